"""What the dispatcher writes and sends, on a real Redis without workers."""

from __future__ import annotations

import base64
import json

import pytest
import redis
from celery import chain

from rollout.schema import RolloutRequest, Stage, State
from services.dispatch import Dispatcher, IdConflict
from services.queues import TASK_CLEANUP, TASK_EVALUATE, TASK_INIT, TASK_RUN, Ref, make_celery
from services.settings import Settings
from services.state.redis import connect
from services.state.rollouts.store import Finish, RolloutStore
from services.state.tenants import Tenant

_BOX = {"id": "s", "runtime": "r", "image": "i", "node": "n", "isolation_missing": []}
BOXED = {"sandbox": json.dumps({"record": _BOX, "socket": "/s"}), "node": "n"}


class Desk:
    """A dispatcher, and what lies in the queues."""

    def __init__(self, url):
        settings = Settings(redis_url=url)
        self.redis = connect(url)
        self.redis.flushall()
        self.store = RolloutStore(self.redis, settings)
        self.dispatcher = Dispatcher(make_celery(settings), self.store)

    def submit(self, tenant=None, **fields):
        request = RolloutRequest(**{"handler": "noop", **fields})
        return self.dispatcher.submit([request], tenant and Tenant(name=tenant))

    def messages(self, queue):
        """Task, arguments and the tasks that follow of each message, the oldest first."""
        messages = []
        for raw in reversed(self.redis.lrange(queue, 0, -1)):
            message = json.loads(raw)
            args, _, embedded = json.loads(base64.b64decode(message["body"]))
            following = [link["task"] for link in reversed(embedded["chain"] or [])]
            messages.append((message["headers"]["task"], args, following))
        return messages

    def ready(self, rollout_id):
        """INIT is done, with a sandbox on node n."""
        claim = self.store.claim(rollout_id, 1, Stage.INIT, "w")
        self.store.note(rollout_id, claim.fence, BOXED)
        assert self.store.finish(claim, Finish(State.READY)) == State.READY


@pytest.fixture
def desk(server):
    return Desk(server.url)


def test_each_new_rollout_has_one_message_of_its_whole_chain(desk):
    first = desk.submit(id="g", n=2)
    assert [(rollout.id, rollout.state, rollout.created) for rollout in first] == [
        ("g.0", State.QUEUED, True),
        ("g.1", State.QUEUED, True),
    ]
    desk.ready("g.0")
    again = desk.submit(id="g", n=2)
    assert [(rollout.state, rollout.created) for rollout in again] == [
        (State.READY, False),
        (State.QUEUED, False),
    ]
    assert desk.messages("init") == [(TASK_INIT, [], [TASK_RUN, TASK_EVALUATE])] * 2


def test_members_of_a_group_that_are_named_are_submitted_and_no_others(desk):
    request = RolloutRequest(handler="noop", id="g", n=4)
    made = desk.dispatcher.submit([request], members=range(1, 3), batch_group="b")
    assert [rollout.id for rollout in made] == ["g.1", "g.2"]
    assert len(desk.messages("init")) == 2
    assert desk.store.get("g.0") is None
    assert desk.redis.hget("rollout:{g.1}", "batch_group") == "b"


@pytest.mark.parametrize(("tenant", "task"), [("a", {"other": 1}), ("b", {})])
def test_an_id_of_somebody_else_or_of_another_body_is_refused_and_nothing_is_sent(desk, tenant, task):
    desk.submit("a", id="g", n=2)
    with pytest.raises(IdConflict) as refused:
        desk.submit(tenant, id="g", n=2, task=task)
    assert refused.value.ids == ["g.0", "g.1"]
    assert len(desk.messages("init")) == 2 and desk.store.counts()["queued"] == 2


@pytest.mark.parametrize(
    ("stage", "queue", "task", "following"),
    [
        ("init", "init", TASK_INIT, [TASK_RUN, TASK_EVALUATE]),
        ("run", "run.n", TASK_RUN, [TASK_EVALUATE]),
        ("eval", "eval.n", TASK_EVALUATE, []),
    ],
)
def test_a_chain_goes_on_from_a_stage_at_the_node_of_its_sandbox(desk, stage, queue, task, following):
    ref = Ref(id="r", attempt=2, node="n")
    desk.dispatcher.send(stage, ref)
    assert desk.messages(queue) == [(task, [] if stage == "init" else [ref], following)]
    desk.dispatcher.ring(0)
    assert len(desk.messages(queue)) == 1


@pytest.mark.parametrize(("stage", "queue"), [("init", "init"), ("run", "run.n")])
def test_the_message_is_that_of_a_celery_chain_in_every_field(desk, stage, queue):
    ref = Ref(id="r", attempt=2, node="n", handler="noop")
    desk.dispatcher.send(stage, ref)
    app = desk.dispatcher._app
    steps = [app.signature(name) for name in (TASK_INIT, TASK_RUN, TASK_EVALUATE)]
    if stage == "run":
        chain(steps[1].clone((ref,)), steps[2]).apply_async()
    else:
        chain(*steps).apply_async()
    bodies, messages, said = [], [], []
    for raw in reversed(desk.redis.lrange(queue, 0, -1)):
        message = json.loads(raw)
        bodies.append(json.loads(base64.b64decode(message.pop("body"))))
        # Each task has an id of its own, and each message a tag.
        own = [message["headers"].pop(name) for name in ("id", "root_id")]
        own.append(message["properties"].pop("correlation_id"))
        assert len(set(own)) == 1 and message["properties"].pop("delivery_tag")
        said.append(message["headers"].pop("argsrepr"))
        messages.append(message)
    assert messages[0] == messages[1]
    assert said[0] == (
        "noop r attempt 2 on n" if stage == "run" else "()"
    )  # for monitors; Celery's is longer
    for step in bodies[1][2]["chain"]:
        # Where the result of each step is found: nobody keeps results.
        assert set(step["options"]) == {"task_id", "reply_to"}
        step["options"] = {}
    assert bodies[0] == bodies[1]


def test_a_cancel_ends_the_sandbox_of_what_waits_and_leaves_that_of_what_runs_to_its_worker(desk):
    waits, runs, queued = (desk.submit("a")[0].id for _ in range(3))
    for boxed in (waits, runs):
        desk.ready(boxed)
    desk.store.claim(runs, 1, Stage.RUN, "w")
    ids = [waits, runs, queued, "nobody"]
    assert desk.dispatcher.cancel_many(ids, "b") == [("gone", "")] * 4
    assert desk.messages("eval.n") == [] and desk.store.state(waits) is State.READY
    assert desk.dispatcher.cancel_many(ids, "a") == [
        ("cancelled", "cancelled"),
        ("cancelling", "running"),
        ("cancelled", "cancelled"),
        ("gone", ""),
    ]
    assert desk.messages("eval.n") == [(TASK_CLEANUP, [Ref(id=waits, attempt=1, node="n")], [])]
    assert desk.dispatcher.cancel(waits) == ("ended", "cancelled")


def test_a_channel_that_another_thread_has_closed_is_a_lost_connection_after_which_kombu_tries_again(server):
    connection = make_celery(Settings(redis_url=server.url)).connection()
    channel = connection.default_channel
    with channel.conn_or_acquire() as first, channel.conn_or_acquire() as again:
        assert first is again and first.ping()
    with channel.conn_or_acquire(client=server.client) as given:
        assert given is server.client
    channel.close()
    with (
        pytest.raises(redis.ConnectionError, match="closed") as refused,
        channel.conn_or_acquire(),
    ):
        raise AssertionError("it was closed")
    assert isinstance(refused.value, connection.recoverable_connection_errors)
