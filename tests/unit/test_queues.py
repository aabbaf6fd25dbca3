"""The router function and the settings of delivery."""

import pytest
from kombu.transport import TRANSPORT_ALIASES

from docs.make_tables import pages
from services import broker
from services.queues import TASK_CLEANUP, TASK_EVALUATE, TASK_INIT, TASK_RUN, make_celery, route
from services.settings import Settings, SettingsError


@pytest.mark.parametrize(
    ("task", "node", "queue"),
    [
        (TASK_INIT, None, "init"),
        (TASK_INIT, "n1", "init"),
        (TASK_RUN, None, "run"),
        (TASK_RUN, "n1", "run.n1"),
        (TASK_EVALUATE, "n1", "eval.n1"),
        (TASK_EVALUATE, None, "eval"),
        (TASK_CLEANUP, "n2", "eval.n2"),
    ],
)
def test_a_stage_goes_to_the_node_that_holds_the_sandbox(task, node, queue):
    assert route(task, ({"id": "a", "attempt": 1, "node": node},), {}, {}) == {"queue": queue}


def test_tasks_of_others_are_not_routed():
    assert route("celery.backend_cleanup", (), {}, {}) is None


def test_messages_are_acknowledged_early_and_results_are_not_kept():
    conf = make_celery(Settings()).conf
    assert conf.task_acks_late is False
    assert conf.result_backend is None
    assert conf.accept_content == ["json"]
    assert conf.worker_prefetch_multiplier == 1
    assert conf.broker_transport_options["ack_emulation"] is False


def test_a_bad_setting_names_its_variable():
    with pytest.raises(SettingsError, match="ROLLOUT_GATEWAY_PORT"):
        Settings.from_env({"ROLLOUT_GATEWAY_PORT": "many"})
    with pytest.raises(SettingsError, match="ROLLOUT_NODE"):
        Settings.from_env({"ROLLOUT_NODE": "a b"})
    assert Settings.from_env({"ROLLOUT_LEASE_S": "5", "ROLLOUT_URL": "http://x"}).lease_s == 5.0


def test_the_pages_of_settings_and_keys_are_those_the_code_makes():
    for page, text in pages().items():
        assert page.read_text() == text, "run python -m docs.make_tables"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://h:1/0", broker.Transport),
        ("rediss://h:1/0", broker.Transport),
        ("unix:///run/redis.sock?db=0", broker.Transport),
        ("sentinel://h:1,i:2/master/0", broker.SentinelTransport),
    ],
)
def test_messages_go_by_the_service_s_own_transport_whatever_the_address(url, kind):
    connection = make_celery(Settings(redis_url=url)).connection()
    assert connection.transport_cls in TRANSPORT_ALIASES
    assert type(connection.transport) is kind and not kind.Channel.do_restore
