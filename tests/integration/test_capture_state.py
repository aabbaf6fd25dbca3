"""What Redis keeps of captured model calls: who may call, what is one call, and the turns that answered."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import redis

from rollout.schema import Stage, State
from rollout.trajectory import Trajectory
from services.settings import Settings
from services.state import keys
from services.state.capture import nodes
from services.state.capture.session import Session
from services.state.capture.store import CaptureStore
from services.state.redis import connect, is_away
from services.state.rollouts.store import Finish, RolloutStore
from services.state.scripts import send_many
from tests.helpers.stack import RedisServer
from tests.integration.conftest import emptied
from tests.integration.test_state import claimed, pass_time, submit

client = emptied


@pytest.fixture
def rollouts(client, server):
    return RolloutStore(client, Settings(redis_url=server.url, lease_s=30))


@pytest.fixture
def captured(client, rollouts):
    return Captured(client, rollouts)


def node(call_id, parent=nodes.ROOT, text="{}"):
    """A turn of four bytes of ids, as capture writes it."""
    return nodes.encode(
        nodes.Node(
            call_id, parent, b"path", b"\1\0\0\0", "[]", "", b"\2\0\0\0", b"\0" * 4, 4, [(None, 0, 1)],
            "stop", text, "chat", "vllm b", {}, b"body",
        )
    )  # fmt: skip


class Captured:
    """A rollout in RUN and the calls of its program."""

    def __init__(self, client, rollouts, **session):
        self.client, self.rollouts, self.store = client, rollouts, CaptureStore(client)
        self.id = submit(rollouts)
        rollouts.finish(claimed(rollouts, Stage.INIT, self.id), Finish(State.READY))
        self.claim = claimed(rollouts, Stage.RUN, self.id)
        if session.pop("opened", True):
            self.open(**session)

    def open(self, **session):
        return self.store.open(
            self.id, 1, self.claim.fence, Session("command", **{"backend": "{}", "index": 0, **session})
        )["word"]

    def ask(self, call):
        (answer,) = send_many(self.client, [call])
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(**answer)

    def begin(self, *args, **more):
        return self.ask(self.beginning(*args, **more))

    def beginning(self, call_id, body="b", retry=False, process="p", attempt=1):
        more = {"call_id": call_id, "body": body, "retry": retry, "process": process}
        return self.store.begin(self.id, attempt, **more)

    def add(self, call_id, parent=nodes.ROOT, sampled=1, attempt=1, stored=None, **more):
        stored = stored or node(call_id, parent)
        return self.ask(self.store.add(self.id, attempt, call_id, stored, parent, sampled, **more))

    def answered(self, call_id, body="b", parent=nodes.ROOT, told=True):
        assert self.begin(call_id, body).word == "ok"
        place = self.add(call_id, parent).node
        if told:
            self.told(call_id)
        return place

    def told(self, call_id):
        return self.ask(self.store.told(self.id, 1, call_id)).word

    def orphan(self, call_id):
        return self.ask(self.store.orphan(self.id, 1, call_id)).word

    def fail(self, call_id, kind="context"):
        return self.ask(self.store.fail(self.id, 1, call_id, kind)).word

    def reward(self, value=1.0, components=None):
        return self.ask(self.store.reward(self.id, 1, value, components or {})).word

    def die(self, process="p"):
        """The process has not said for 6 s that it lives."""
        self.client.delete(keys.capture_alive(process))

    @property
    def summary(self):
        return self.store.summary(self.id, 1)

    @property
    def nodes(self):
        return nodes.decode(self.store.nodes(self.id, 1))


# -- who may call ----------------------------------------------------------------------------------


def test_a_call_is_answered_only_while_its_attempt_is_open(client, rollouts):
    captured = Captured(client, rollouts, opened=False)
    assert captured.begin("c").word == captured.add("c").word == captured.told("c") == "early"
    assert captured.reward() == "early" and captured.summary is None
    assert captured.begin("c", attempt=2).word == "unknown" and captured.begin("c", attempt=0).word == "ended"
    assert captured.open(most_calls=7) == "ok"
    begun = captured.begin("c")
    assert (begun.word, begun.call, begun.nodes, begun.calls, begun.sampled) == ("ok", "c", 0, 1, 0)
    assert begun.fence == captured.claim.fence and '"most_calls":7' in begun.session
    assert captured.store.close(captured.id, 1, captured.claim.fence) == {"word": "ok"}
    assert {captured.begin("c").word, captured.add("c").word, captured.orphan("c")} == {"ended"}
    assert captured.reward() == captured.fail("c") == "ended"
    assert captured.summary.closed and captured.nodes == []
    captured.id = "no-such"
    assert captured.begin("c").word == "unknown"


def test_only_who_holds_the_rollout_opens_and_closes_it(client, rollouts):
    captured = Captured(client, rollouts, opened=False)
    store, fence = captured.store, captured.claim.fence
    lost = [(captured.id, 1, fence - 1), (captured.id, 2, fence), ("no-such", 1, fence)]
    assert {store.open(*who, Session("command", "{}", 0))["word"] for who in lost} == {"lost"}
    assert captured.summary is None and captured.open() == "ok"
    assert {store.close(*who)["word"] for who in lost} == {"lost"} and not captured.summary.closed


@pytest.mark.parametrize("over", ["cancelled", "evaluating", "next attempt"])
def test_calls_end_with_the_attempt(captured, over):
    captured.begin("c")
    if over == "cancelled":
        captured.rollouts.cancel(captured.id)
    else:
        outcome = (
            Finish("again") if over == "next attempt" else Finish(State.EVALUATING, trajectory=Trajectory())
        )
        captured.rollouts.finish(captured.claim, outcome)
    assert captured.begin("d").word == captured.add("c").word == captured.told("c") == "ended"
    assert captured.begin("d", attempt=2).word == ("early" if over == "next attempt" else "unknown")


def test_a_worker_that_takes_run_over_finds_the_session_as_it_was(client, rollouts):
    captured = Captured(client, rollouts, ends_in_s=100)
    captured.answered("a")
    captured.begin("b", "other")
    before = captured.summary
    old, _ = captured.claim, client.hset(keys.HANDLERS_REPEATABLE, "noop", "run")
    pass_time(client, captured.id, 31)
    assert [due.action for due in rollouts.overdue()] == ["resume"]
    assert captured.begin("c", "third").word == "ok", "calls go on meanwhile"
    captured.claim = claimed(rollouts, Stage.RUN, captured.id)
    assert captured.store.open(captured.id, 1, old.fence, Session("command", "{}", 0))["word"] == "lost"
    margin = client.hget(keys.capture(captured.id, 1), "margin")
    assert captured.open(ends_in_s=900) == "ok"
    assert client.hget(keys.capture(captured.id, 1), "margin") == margin
    assert captured.begin("d", "fourth").fence == captured.claim.fence
    assert captured.add("b").node == 1
    after = captured.summary
    assert (before.calls, before.nodes, before.in_flight) == (2, 1, 1)
    assert (after.calls, after.nodes, after.in_flight) == (4, 2, 2)


def test_a_session_goes_where_the_turn_log_goes(captured):
    client, names = captured.client, (keys.capture, keys.capture_calls, keys.capture_nodes)
    captured.answered("a")
    deadline = captured.claim.deadline_in_s + 600
    for name in names:
        assert deadline - 10 < client.pttl(name(captured.id, 1)) / 1000 <= deadline
    captured.store.close(captured.id, 1, captured.claim.fence)
    assert [turn.call_id for turn in captured.nodes] == ["a"]
    captured.rollouts.finish(captured.claim, Finish(State.EVALUATING, trajectory=Trajectory()))
    assert client.exists(*(name(captured.id, 1) for name in names)) == 0 and captured.summary is None


def test_a_takeover_with_captured_turns_between_costs_nothing(captured):
    """A worker that dies again and again without a turn is the rollout's fault; with one it is not."""
    captured.client.hset(keys.HANDLERS_REPEATABLE, "noop", "run")
    for turn in range(5):
        captured.answered(f"c{turn}", f"b{turn}")
        pass_time(captured.client, captured.id, 31)
        assert [due.action for due in captured.rollouts.overdue()] == ["resume"]
        captured.claim = claimed(captured.rollouts, Stage.RUN, captured.id)
    pass_time(captured.client, captured.id, 31)
    assert [due.action for due in captured.rollouts.overdue()] == ["restart"], "the second without a turn"
    assert captured.client.exists(keys.capture_nodes(captured.id, 1)) == 0
    assert captured.begin("late").word == "ended"


# -- limits ----------------------------------------------------------------------------------------


def test_calls_past_a_limit_are_counted_and_answered_without_the_model(client, rollouts):
    captured = Captured(client, rollouts, most_calls=2)
    captured.answered("a")
    captured.begin("b", "other")
    for times in (1, 2):
        stopped = captured.begin("c", "third")
        assert (stopped.word, stopped.why, stopped.answered) == ("limit", "turn_limit", times)
    assert captured.begin("a").word == "again" and captured.begin("b", "other").word == "joined"
    captured.die()
    assert captured.begin("b", "other", process="q").word == "ok", "it is counted already"
    assert captured.fail("b") == "ok"
    assert captured.begin("c", "third").word == "ok", "what was refused is given back"
    summary = captured.summary
    assert (summary.calls, summary.limited, summary.stopped) == (2, 2, "turn_limit")


def test_what_was_sampled_and_the_time_are_limits_too(client, rollouts):
    captured = Captured(client, rollouts, most_sampled=5)
    captured.begin("a", "a")
    captured.add("a", sampled=4)
    assert captured.begin("b", "b").sampled == 4
    captured.add("b", sampled=1)
    assert captured.begin("c", "c").why == "token_limit"
    captured = Captured(client, rollouts, ends_in_s=50)
    assert captured.begin("a").word == "ok"
    captured.die()
    client.hincrby(keys.record(captured.id), "deadline", -51_000)
    limited = captured.begin("c", "c", process="q"), captured.begin("a", process="q")
    assert [answer.why for answer in limited] == ["time_limit"] * 2
    assert captured.summary.in_flight == 0 and captured.summary.stopped == "time_limit"
    assert captured.add("a").word == "ok", "what was begun in time may still be answered"


def test_the_end_of_a_session_moves_with_the_clock(client, rollouts):
    captured = Captured(client, rollouts, ends_in_s=50)
    client.hincrby(keys.record(captured.id), "deadline", 3_600_000)  # as `jump.lua` does it
    margin = int(client.hget(keys.capture(captured.id, 1), "margin"))
    left = int(client.hget(keys.record(captured.id), "deadline")) - margin - captured.summary.now_ms
    assert 3_600_000 + 40_000 < left <= 3_600_000 + 50_000


# -- repetitions -----------------------------------------------------------------------------------


def test_the_same_call_again_is_joined_and_then_replayed(captured):
    captured.begin("a")
    again = captured.begin("a", process="q")
    assert (again.word, again.call) == ("joined", "a")
    place = captured.add("a").node
    again = captured.begin("a", retry=None, process="q")
    assert (again.word, again.call, again.node) == ("again", "a", place)
    captured.told("a")
    assert captured.begin("a", body="whatever").word == "again"
    assert (captured.summary.calls, captured.summary.retries) == (1, 2)


def test_a_program_may_ask_the_same_twice(captured):
    captured.begin("a")
    assert captured.begin("b").word == "ok", "the first one's client waits still"
    captured.add("a")
    captured.told("a")
    captured.add("b")
    captured.told("b")
    assert captured.begin("c").word == "ok"
    assert [turn.call_id for turn in captured.nodes] == ["a", "b"] and captured.summary.retries == 0


@pytest.mark.parametrize("why", ["retry", "orphan", "dead", "untold"])
def test_the_same_body_is_the_same_call_where_nobody_has_its_answer(captured, why):
    captured.begin("a")
    if why == "orphan":
        captured.orphan("a")
    elif why == "dead":
        captured.die()
    elif why == "untold":
        captured.add("a")
    again = captured.begin("b", retry=why == "retry", process="q")
    assert again.call == "a" and again.word == {"dead": "ok", "untold": "again"}.get(why, "joined")
    assert captured.begin("x", "another body", retry=True).call == "x"
    if why != "untold":
        captured.add("a")
    captured.told("b")
    assert captured.begin("b").word == "again", "its second id names it too"
    assert captured.begin("c").word == "ok" and captured.summary.calls == 3


def test_an_orphan_that_is_joined_has_a_client_again(captured):
    captured.begin("a")
    captured.orphan("a")
    assert captured.begin("b").word == "joined" and captured.begin("c").word == "ok"


def test_the_latest_call_with_a_body_is_the_one_repeated(captured):
    first, second = captured.answered("a"), captured.answered("b")
    again = captured.begin("c", retry=True)
    assert (again.word, again.node) == ("again", second) and first != second


def test_a_lost_call_is_taken_over_once(captured):
    captured.begin("a")
    captured.die()
    assert captured.summary.in_flight == 0
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: captured.begin("a", process=f"q{n}"), range(32)))
    assert sorted(answer.word for answer in answers) == ["joined"] * 31 + ["ok"]
    assert {answer.call for answer in answers} == {"a"}
    assert (captured.summary.calls, captured.summary.in_flight) == (1, 1)


def test_a_process_lives_for_six_seconds_after_it_said_so(captured):
    captured.begin("a")
    captured.die()
    began = time.monotonic()
    captured.ask(captured.store.alive("p"))
    left_s = captured.client.pttl(keys.capture_alive("p")) / 1000
    assert left_s <= 6 and left_s + time.monotonic() - began > 5
    assert captured.begin("a", process="q").word == "joined"


def test_a_refused_call_may_come_again(captured):
    captured.begin("a")
    captured.begin("b", "other")
    assert (
        captured.fail("a") == captured.fail("b", "unavailable") == captured.fail("b", "unavailable") == "ok"
    )
    summary = captured.summary
    assert (summary.calls, summary.in_flight) == (0, 0)
    assert summary.refused == {"context": 1, "unavailable": 1}
    assert captured.begin("b", retry=True).call == "b"
    captured.add("b")
    captured.fail("b")
    assert captured.summary.calls == 1 and captured.summary.refused == summary.refused


def test_a_begin_that_is_sent_again_is_answered_alike(captured):
    """As `Placements` does it when the connection is lost before the answer came."""
    call = captured.beginning("a")
    first, second = captured.ask(call), captured.ask(call)
    assert first == second and first.word == "ok" and first.calls == 1
    another = captured.begin("a")
    assert (another.word, another.process) == ("joined", "p"), "another request to the same process waits"
    assert (captured.summary.calls, captured.summary.retries) == (1, 1)


def test_a_program_that_repeats_itself_for_ever_fills_nothing(captured):
    captured.answered("a")
    for n in range(300):
        assert captured.begin(f"again-{n}", retry=True).word == "again"
    assert captured.client.hlen(keys.capture_calls(captured.id, 1)) < 110


# -- answers ---------------------------------------------------------------------------------------


def test_the_first_answer_to_a_call_counts(captured):
    captured.begin("a")
    first = captured.add("a", sampled=3)
    assert vars(first) == {"word": "ok", "node": 0, "at": first.at, "other": False}
    assert vars(captured.add("a", sampled=3)) == vars(first)
    other = captured.add("a", sampled=9, stored=node("a", text='{"another": 1}'))
    assert vars(other) == vars(first) | {"other": True}
    assert captured.summary.sampled == 3
    (stored,) = captured.nodes
    assert stored == nodes.decode([node("a")])[0].__class__(**_fields(node("a")) | {"at_ms": first.at})
    assert abs(captured.summary.now_ms - first.at) < 60_000


def _fields(encoded):
    (stored,) = nodes.decode([encoded])
    return {name: getattr(stored, name) for name in stored.__struct_fields__}


def test_nodes_are_read_from_a_place_on(captured):
    for place in range(4):
        captured.answered(f"c{place}", f"b{place}", place - 1)
    assert [turn.parent for turn in captured.nodes] == [-1, 0, 1, 2]
    tail = nodes.decode(captured.store.nodes(captured.id, 1, 2))
    assert [turn.call_id for turn in tail] == ["c2", "c3"] and captured.store.nodes(captured.id, 1, 9) == []
    stored = captured.store.nodes(captured.id, 1)
    assert nodes.encode(nodes.decode(stored)[1]) == node("c1", 0), "it may be added again as it is read"


def test_a_parent_that_is_not_there_is_not_built_upon(captured):
    captured.answered("a")
    captured.begin("b", "b")
    missing = captured.add("b", parent=1)
    assert (missing.word, missing.at) == ("behind", 1)
    swapped = captured.add("b", parent=0, parent_call="another")
    assert (swapped.word, swapped.at) == ("behind", 0)
    assert captured.add("b", parent=0, parent_call="a").node == 1 and captured.summary.nodes == 2


def test_answers_to_many_calls_at_once_have_a_place_each(captured):
    def call(n):
        begun = captured.begin(f"c{n}", f"b{n % 7}", process=f"p{n % 3}")
        assert begun.word in ("ok", "again", "joined")
        if begun.word == "ok":
            return [captured.add(begun.call).node for _ in range(2)]
        return []

    with ThreadPoolExecutor(12) as pool:
        places = [place for places in pool.map(call, range(200)) for place in places]
    assert sorted(places) == sorted([*range(len(captured.nodes))] * 2)
    ids = [turn.call_id for turn in captured.nodes]
    assert len(set(ids)) == len(ids) == captured.summary.calls == captured.summary.sampled


# -- the end of a program --------------------------------------------------------------------------


def test_a_reward_is_posted_once_and_only_where_the_session_says_so(client, rollouts):
    captured = Captured(client, rollouts)
    assert captured.reward() == "forbidden" and not captured.summary.finished
    assert captured.ask(captured.store.finish(captured.id, 1)).word == "ok"
    assert captured.summary.finished and captured.summary.reward is None
    captured = Captured(client, rollouts, rewarded=True)
    value, components = 0.1 + 0.2, {"a b": 1 / 3}
    with ThreadPoolExecutor(4) as pool:
        words = list(pool.map(lambda _: captured.reward(value, components), range(8)))
    assert sorted(words) == ["again"] * 7 + ["ok"]
    assert captured.reward(9) == "again"
    summary = captured.summary
    assert (summary.reward, summary.components, summary.finished) == (value, components, True)
    assert captured.begin("late").word == "ok", "RUN ends it"


def test_all_processes_have_one_secret(client):
    stores = [CaptureStore(client) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(CaptureStore.secret, stores))
    assert len(secrets) == 1 and len(bytes.fromhex(secrets.pop())) == 32


def test_a_full_redis_takes_no_turns_and_lets_sessions_end(client, rollouts):
    captured = Captured(client, rollouts, rewarded=True)
    captured.answered("a")
    captured.begin("b", "other")
    client.config_set("maxmemory", 1)
    try:
        for write in (lambda: captured.begin("c", "third"), lambda: captured.add("b"), captured.reward):
            with pytest.raises(redis.OutOfMemoryError):
                write()
        assert captured.open() == "ok" and captured.begin("a").word == "again"
        assert captured.begin("b", "other").word == "joined"
        assert captured.told("a") == captured.orphan("b") == captured.fail("b") == "ok"
        assert captured.ask(captured.store.alive("p")).word == "ok"
        assert captured.store.close(captured.id, 1, captured.claim.fence)["word"] == "ok"
    finally:
        client.config_set("maxmemory", 0)
    assert [turn.call_id for turn in captured.nodes] == ["a"] and captured.summary.calls == 1


# -- any order of events ---------------------------------------------------------------------------


@dataclass
class One:
    """A call of the model below."""

    body: str
    process: str
    away: bool = False
    place: int | None = None
    told: bool = False


@dataclass
class Model:
    """What a session is, in as few words as there are."""

    most_calls: int
    calls: dict[str, One] = field(default_factory=dict)
    """By their first ids."""
    names: dict[str, str] = field(default_factory=dict)
    """Further ids of a call, which may be refused and begun again."""
    latest: dict[str, str] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)
    living: set[str] = field(default_factory=set)
    retries: int = 0
    refused: int = 0
    limited: int = 0

    def first(self, call_id):
        while call_id not in self.calls and call_id in self.names:
            call_id = self.names[call_id]
        return call_id

    def begin(self, call_id, body, retry, process):
        first = self.first(call_id)
        if first not in self.calls and (known := self.calls.get(self.latest.get(body))) is not None:
            lost = known.place is None and known.process not in self.living
            if retry or known.away or lost or (known.place is not None and not known.told):
                first = self.names[call_id] = self.latest[body]
        if first in self.calls:
            call = self.calls[first]
            self.retries += 1
            if call.place is not None:
                return "again", call.place, first
            if call.process in self.living | {process}:
                call.away = False
                return "joined", None, first
        elif len(self.calls) >= self.most_calls:
            self.limited += 1
            return "limit", None, None
        else:
            first = call_id
            call = self.calls[first] = One(body, process)
        call.process, call.away = process, False
        self.latest[call.body] = first
        self.living.add(process)
        return "ok", None, first

    def add(self, call_id):
        first = self.first(call_id)
        call = self.calls[first]
        if call.place is None:
            call.place, call.away = len(self.answers), False
            self.answers.append(first)
        return "ok", call.place

    def note(self, event, call_id):
        call = self.calls.get(self.first(call_id))
        if event == "told" and call and call.place is not None:
            call.told = True
        elif event == "orphan" and call and call.place is None:
            call.away = True
        elif event == "fail" and call and call.place is None:
            self.refused += 1
            del self.calls[self.first(call_id)]


@pytest.mark.parametrize("seed", range(15))
def test_any_order_of_events_is_as_a_small_model_says(client, rollouts, seed):
    dice = random.Random(seed)
    captured, model = Captured(client, rollouts, most_calls=12), Model(12)
    for _ in range(150):
        call_id, body = f"c{dice.randrange(16)}", f"b{dice.randrange(4)}"
        process, retry = f"p{dice.randrange(3)}", dice.random() < 0.3
        event = dice.choices(["begin", "add", "told", "orphan", "fail", "die"], [8, 5, 3, 2, 1, 1])[0]
        if event == "begin":
            answer = captured.begin(call_id, body, retry, process)
            told = answer.word, getattr(answer, "node", None), getattr(answer, "call", None)
            assert told == model.begin(call_id, body, retry, process)
            client.persist(keys.capture_alive(process))  # a slow machine ends nobody
        elif event == "add" and model.first(call_id) in model.calls:
            first = model.first(call_id)
            answer = captured.add(call_id, dice.randrange(-1, len(model.answers)), stored=node(first))
            assert (answer.word, answer.node) == model.add(call_id)
        elif event in ("told", "orphan", "fail"):
            model.note(event, call_id)
            asked = captured.fail(call_id, "busy") if event == "fail" else getattr(captured, event)(call_id)
            assert asked == "ok"
        elif event == "die":
            captured.die(process)
            model.living.discard(process)
        summary, flying = captured.summary, [call for call in model.calls.values() if call.place is None]
        assert summary.in_flight == sum(call.process in model.living for call in flying)
        assert (summary.calls, summary.nodes) == (len(model.calls), len(model.answers))
        assert (summary.retries, summary.limited) == (model.retries, model.limited)
        assert (summary.sampled, sum(summary.refused.values())) == (len(model.answers), model.refused)
    ids = [turn.call_id for turn in captured.nodes]
    assert ids == model.answers and len(set(ids)) == len(ids)


# -- a Redis that is killed ------------------------------------------------------------------------


@pytest.fixture
def mortal(tmp_path):
    """Redis of the test's own, and a rollout in RUN there."""
    servers = [RedisServer(tmp_path)]
    client = connect(servers[0].url)
    yield servers, Captured(client, RolloutStore(client, Settings(redis_url=servers[0].url, lease_s=300)))
    servers[-1].stop()


def lose(servers, since):
    """Kill Redis and start it again without what it did last; `since`: sizes of its files before that."""
    servers[-1].crash()
    for file, size in since.items():
        with file.open("r+b") as written:
            written.truncate(size)
    servers.append(servers[-1].restarted())


def kept(servers):
    """The sizes of the append-only files with all that was answered."""
    servers[-1].client.config_set("appendfsync", "always")
    files = list(servers[-1].directory.rglob("*.incr.aof"))
    assert files
    return {file: file.stat().st_size for file in files}


def test_what_a_killed_redis_has_lost_is_added_again(mortal):
    servers, captured = mortal
    captured.answered("a")
    captured.begin("b", "b")
    since = kept(servers)
    captured.add("b", parent=0)
    captured.told("b")
    captured.begin("c", "c")
    captured.add("c", parent=1, parent_call="b")
    captured.begin("d", "d")
    lose(servers, since)
    assert captured.summary.nodes == 1
    behind = captured.add("d", parent=2, parent_call="c")
    assert (behind.word, behind.at) == ("behind", 1)
    # Another process's call has the place meanwhile: the parent's name tells it.
    captured.begin("x", "x", process="q")
    assert captured.add("x", parent=0).node == 1
    assert captured.add("c", parent=1, parent_call="b").word == "behind"
    assert captured.add("b", parent=0, parent_call="a").node == 2
    assert captured.add("c", parent=2, parent_call="b").node == 3
    assert captured.add("d", parent=3, parent_call="c").node == 4
    assert [(turn.call_id, turn.parent) for turn in captured.nodes] == [
        ("a", -1), ("x", 0), ("b", 0), ("c", 2), ("d", 3),
    ]  # fmt: skip
    summary = captured.summary
    assert (summary.calls, summary.sampled, summary.in_flight) == (5, 5, 0)


def test_a_session_whose_opening_was_lost_is_opened_again(mortal):
    servers, captured = mortal
    since = kept(servers)
    captured.client.delete(keys.capture(captured.id, 1))
    since = kept(servers)
    captured.open()
    captured.begin("a")
    lose(servers, since)
    assert captured.begin("a").word == captured.add("a").word == "early" and captured.summary is None
    assert captured.open() == "ok" and captured.add("a").node == 0
    assert captured.summary.calls == 1


def test_calls_while_redis_is_killed_have_one_node_each(mortal):
    servers, captured = mortal
    calls = 150

    def patiently(asked):
        while True:
            try:
                return captured.ask(asked)
            except redis.RedisError as error:
                # Where it is killed twice in one call, the second one has forgotten the scripts again.
                assert is_away(error) or isinstance(error, redis.exceptions.NoScriptError), error
                time.sleep(0.02)

    def call(n):
        name = f"c{n}"
        begun = patiently(captured.beginning(name, f"b{n}", process=f"p{n % 3}"))
        assert begun.word == "ok"
        for asked in (
            captured.store.add(captured.id, 1, name, node(name), nodes.ROOT, 1),
            captured.store.told(captured.id, 1, name),
        ):
            assert patiently(asked).word == "ok"

    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(call, n) for n in range(calls)]
        for _ in range(2):
            time.sleep(0.05)
            servers[-1].crash()
            servers.append(servers[-1].restarted())
        for one in running:
            one.result()
    assert sorted(turn.call_id for turn in captured.nodes) == sorted(f"c{n}" for n in range(calls))
    assert (captured.summary.calls, captured.summary.sampled) == (calls, calls)
