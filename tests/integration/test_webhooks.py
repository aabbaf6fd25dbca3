"""Webhooks by a real worker to a receiver on loopback, which fails, hangs and redirects; and its archive."""

from __future__ import annotations

import gzip
import json
from urllib.parse import urlsplit

import pytest

from rollout import RolloutRequest, State, Webhook, archive, verify_webhook
from rollout.client import ApiError, Client
from services.queues import make_celery
from services.settings import Settings
from tests.helpers.gateways import started_gateway
from tests.helpers.keys import http
from tests.helpers.stack import NODE, free_port, wait_until
from tests.helpers.webhook_receiver import ADDRESS, RunningReceiver

SECRET = "of the tests"
ENV = {
    "ROLLOUT_WEBHOOK_SECRET": SECRET,
    "ROLLOUT_WEBHOOK_ALLOW": ADDRESS,
    "ROLLOUT_WEBHOOK_TRIES": "2",
}


@pytest.fixture(scope="module")
def receiver():
    with RunningReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def gateway(stack):
    with started_gateway(stack, "gateway-webhooks", free_port(), ENV) as gateway:
        yield gateway.url


@pytest.fixture(scope="module")
def archive_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("archive")


@pytest.fixture(scope="module")
def deliverer(stack, archive_dir):
    """The first worker that has the secret and the archive; a test that ends it starts another one."""
    worker = stack.start_worker("eval", "webhooks", env=worker_env(archive_dir))
    yield worker
    worker.stop()


@pytest.fixture
def client(gateway, deliverer):
    with Client(gateway) as client:
        yield client


def worker_env(archive_dir):
    return {**ENV, "ROLLOUT_ARCHIVE_DIR": str(archive_dir), "ROLLOUT_ARCHIVE_FILE_BYTES": "20000"}


def archived(archive_dir):
    return {rollout.id for rollout in archive.read(archive_dir)}


def run(client, url, **fields):
    """A rollout that has ended and has a webhook."""
    hook = Webhook(url=url, include=fields.pop("include", "summary"))
    (done,) = client.run([RolloutRequest(handler="noop", webhook=hook, **fields)], timeout=240)
    return done


def test_a_worker_that_is_shut_down_by_command_ends_and_leaves_the_list(stack, archive_dir):
    """As `celery control shutdown` and Flower do it: without a signal."""
    worker = stack.start_worker("eval", "told", env=worker_env(archive_dir))
    name = f"told@{NODE}"
    control = make_celery(Settings(redis_url=stack.redis.url)).control

    def ended():
        # Nobody keeps a command for a worker that does not listen yet, though it is on the list.
        control.shutdown(destination=[name])
        return worker.popen.poll() is not None

    wait_until(ended, 120, "the worker to end")
    assert name not in stack.redis.client.zrange("workers:eval", 0, -1)


def given_up(gateway):
    return {row["id"]: row for row in http.get(f"{gateway}/v1/webhooks", timeout=240).json()["failures"]}


def test_each_rollout_of_a_group_is_announced_with_a_signature_that_holds(client, receiver):
    hook = Webhook(url=f"{receiver.url}/group")
    done = client.run([RolloutRequest(handler="noop", n=3, webhook=hook)], timeout=240)
    wait_until(lambda: len(receiver.at("/group")) >= 3, 120, "three webhooks")
    events = [verify_webhook(call.body, call.headers, SECRET) for call in receiver.at("/group")]
    assert {item.id for item in events} == {item.id for item in done}
    assert {item.completion for item in events} == {item.completion for item in done}
    assert {call.headers["webhook-id"] for call in receiver.at("/group")} == {item.id for item in done}


def test_a_cancelled_rollout_is_announced_too(client, receiver):
    hook = Webhook(url=f"{receiver.url}/cancelled")
    (new,) = client.submit(RolloutRequest(handler="noop", task={"run_s": 600}, webhook=hook))
    client.cancel(new.id)
    wait_until(lambda: receiver.at("/cancelled"), 120, "the webhook")
    (call,) = receiver.at("/cancelled")
    assert verify_webhook(call.body, call.headers, SECRET).state is State.CANCELLED


def test_a_receiver_that_fails_is_tried_again_with_the_same_id(client, receiver):
    done = run(client, f"{receiver.url}/fail/1")
    wait_until(lambda: len(receiver.at("/fail/1")) >= 2, 120, "the second try")
    assert {call.headers["webhook-id"] for call in receiver.at("/fail/1")} == {done.id}
    assert len({call.body for call in receiver.at("/fail/1")}) == 1


def test_what_fails_too_often_is_given_up_shown_and_sent_again_when_asked(client, receiver, gateway):
    done = run(client, f"{receiver.url}/fail/2")
    failure = wait_until(lambda: given_up(gateway).get(done.id), 120, "the webhook to be given up")
    assert (failure["tries"], failure["error"]) == (2, "HTTP 500")
    again = http.post(f"{gateway}/v1/webhooks/redeliver", json={"ids": [done.id, "nobody"]}, timeout=240)
    assert again.json() == {"redelivering": 1}
    wait_until(lambda: len(receiver.at("/fail/2")) == 3, 120, "the webhook after that")


# `localhost` is 127.0.0.1 or ::1, and the receiver's address is neither.
@pytest.mark.parametrize(
    ("url", "tries", "calls", "error"),
    [
        ("{receiver}/gone", 1, 1, "HTTP 410"),
        ("{receiver}/redirect", 2, 2, "HTTP 307"),
        ("http://localhost:9/x", 2, 0, "webhooks may not go to 'localhost'"),
    ],
    ids=["who wants no more", "a redirect", "a name that leads to an address that is not allowed"],
)
def test_some_are_given_up_uncalled_or_after_as_many_tries(
    client, receiver, gateway, url, tries, calls, error
):
    url = url.format(receiver=receiver.url)
    done = run(client, url)
    failure = wait_until(lambda: given_up(gateway).get(done.id), 120, "the webhook to be given up")
    assert failure["tries"] == tries and error in failure["error"]
    assert len(receiver.at(urlsplit(url).path)) == calls and receiver.at("/after-redirect") == []


def test_an_address_that_is_not_allowed_is_refused_at_submission(client, gateway):
    body = {"handler": "noop", "webhook": {"url": "http://10.0.0.1/x"}}
    refused = http.post(f"{gateway}/v1/rollouts", json=body, timeout=240)
    assert refused.status_code == 400
    assert refused.json()["errors"][0]["field"] == "webhook.url"
    assert "ROLLOUT_WEBHOOK_ALLOW" in refused.json()["detail"]


def test_without_a_secret_a_webhook_is_refused_and_nothing_is_enqueued(stack):
    hook = Webhook(url="http://trainer.example/x")
    with pytest.raises(ApiError, match="ROLLOUT_WEBHOOK_SECRET"):
        stack.client.submit([RolloutRequest(handler="noop"), RolloutRequest(handler="noop", webhook=hook)])


def test_a_receiver_that_hangs_holds_up_no_other_delivery(client, receiver):
    run(client, f"{receiver.url}/slow")
    wait_until(lambda: receiver.at("/slow"), 120, "the call that hangs")
    rollout = run(client, f"{receiver.url}/beside-a-slow-one")
    wait_until(lambda: receiver.at("/beside-a-slow-one"), 120, "the other webhook")
    assert not receiver.release.is_set(), "the first call was not answered meanwhile"
    receiver.release.set()
    assert receiver.at("/beside-a-slow-one")[0].headers["webhook-id"] == rollout.id


def test_a_deliverer_killed_in_the_middle_of_a_try_loses_no_webhook_and_nothing_of_the_archive(
    stack, client, receiver, deliverer, archive_dir
):
    wait_until(lambda: archived(archive_dir), 120, "the first worker to archive")
    done = run(client, f"{receiver.url}/hang", include="trajectory")
    assert receiver.hanging.wait(120)
    deliverer.kill()
    receiver.heal.set()
    new = client.submit(RolloutRequest(handler="noop", n=40))
    before = len(receiver.at("/hang"))
    successor = stack.start_worker("eval", "webhooks-2", env=worker_env(archive_dir))
    try:
        ended = {item.id for item in client.stream([rollout.id for rollout in new], timeout=240)}
        wait_until(
            lambda: len(receiver.at("/hang")) > before, 120, "the try of the next deliverer", successor
        )
        wait_until(lambda: stack.redis.client.zcard("webhooks:due") == 0, 120, "nothing to be left")
        expected = ended | {done.id}
        wait_until(lambda: expected <= archived(archive_dir), 120, "all to be archived", successor)
    finally:
        successor.stop()
    assert json.loads(receiver.at("/hang")[-1].body)["data"]["id"] == done.id
    for path in archive.files(archive_dir):
        assert path.name.endswith(".jsonl.gz"), "a worker that stops closes its file"
        gzip.decompress(path.read_bytes())
    logs = "".join(path.read_text(errors="replace") for path in stack.directory.glob("*webhooks*.log"))
    assert SECRET not in logs
