"""Backends that die, hang and lie under live rollouts: all of them end, with the right tokens, counted right.

The backends are fakes whose answers are a pure function of the prompt, so every id of a trajectory can be
checked, whichever backend served the call and however often it was tried.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from rollout.schema import Blame, RolloutRequest, State
from tests.helpers.fake_engine import fake_engine
from tests.helpers.fake_language import FakeLanguage
from tests.helpers.llm_servers import DEMO_MODEL
from tests.helpers.long_forms import CHAOS
from tests.helpers.stack import Stack, wait_until
from workers.agent.codec import load_codec

IDS = {"first_id": 20, "vocab_size": 300}
"""Plain text in the vocabulary of the demo model: no control tokens."""
LANGUAGE = FakeLanguage(**IDS, answer_tokens=(10, 30))
TURN_TOKENS = 64
PATIENCE_S = 120
TALKS = CHAOS("rollouts on three backends of which one is killed", short=100, long=200)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A service of its own, so that its backends may be broken; without any yet."""
    env = {"ROLLOUT_BACKEND_PROBE_S": "0.5", "ROLLOUT_BACKEND_WAIT_S": "8"}
    # One worker has 200 rollouts beside other tests; a stack's usual 3 s without a heartbeat happen there.
    env["ROLLOUT_LEASE_S"] = "10"
    with (
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir,
        Stack(tmp_path_factory.mktemp("stack"), Path(sandbox_dir), env) as stack,
    ):
        stack.start_workers({"others": "init,eval", "run": "run"}, slots=256)
        yield stack


@pytest.fixture(scope="module")
def idle():
    """Fakes that no test has now, by their options, and where to end them."""
    with ExitStack() as ends:
        yield defaultdict(list), ends


@pytest.fixture
def fleet(service, idle):
    """Registers fakes: `fleet(3, step_ms=10)`; forgets them afterwards, and leaves to others who lives."""
    fakes, ends = idle
    with ExitStack() as stack:

        def start(count, **options):
            servers = {}
            others = fakes[tuple(options.items())]
            for number in range(count):
                server = (
                    others.pop(0)
                    if others
                    else ends.enter_context(fake_engine(answer_tokens=(10, 30), **IDS, **options))
                )
                stack.callback(leave, server, others)
                service.client.add_backend(server.url, id=f"fake{number}")
                stack.callback(service.client.remove_backend, f"fake{number}")
                servers[f"fake{number}"] = server
            return servers

        yield start


def leave(server, others):
    with suppress(httpx.HTTPError):
        httpx.post(f"{server.url}/fault", json={"kind": "none"}).raise_for_status()
        others.append(server)


def talk(count, *, turns=4, tag, **fields):
    return [
        RolloutRequest(
            handler="talker",
            task={"text": f"say {number} of {tag}", "turns": turns, "max_tokens": TURN_TOKENS},
            tags=[tag],
            **fields,
        )
        for number in range(count)
    ]


def collect(service, submitted):
    """Each rollout at its end, by id."""
    return {new.id: service.client.wait(new.id, timeout=PATIENCE_S) for new in submitted}


def require_completed(service, submitted):
    """All rollouts by id, once they are completed with the right tokens and nothing is reserved for them."""
    ended = collect(service, submitted)
    assert Counter(rollout.state for rollout in ended.values()) == {State.COMPLETED: len(submitted)}
    for rollout in ended.values():
        check_tokens(rollout)
    check_counters(service)
    return ended


def check_tokens(rollout):
    """Every id and log-prob is what the language says for what stands before it."""
    stop = load_codec(str(DEMO_MODEL)).stop_token_ids
    context: list[int] = []
    calls = 0
    for segment in rollout.trajectory.chain.segments:
        if segment.sampled:
            expected = LANGUAGE.answer(context, max_tokens=TURN_TOKENS, stop_token_ids=stop)
            assert segment.token_ids == expected.token_ids
            assert segment.logprobs == pytest.approx(expected.logprobs)
            calls += 1
        context += segment.token_ids
    assert calls == rollout.request.task["turns"]


def check_counters(service):
    """Nothing is reserved and nobody is pinned once all have ended."""
    assert [(backend.load, backend.live_rollouts) for backend in service.client.backends()] == (
        [(0.0, 0)] * len(service.client.backends())
    )
    assert service.redis.client.hgetall("backends:pins") == {}
    assert service.redis.client.hgetall("backends:groups") == {}


def live_calls(server):
    return sum(call["state"] == "running" for call in calls_of(server))


def test_one_of_three_backends_killed_under_many_rollouts_loses_none_and_no_token(service, fleet):
    servers = fleet(3, step_ms=40)
    pace(10, *servers.values())
    submitted = service.client.submit(talk(TALKS, turns=5, tag="kill"))
    counts = service.redis.client
    wait_until(lambda: int(counts.hget("rollouts:counts", "running") or 0) >= TALKS, 120, "all to be live")
    wait_until(lambda: live_calls(servers["fake1"]) > 20, 120, "calls in the backend")
    os.kill(servers["fake1"].pid, signal.SIGKILL)
    pace(1, servers["fake0"], servers["fake2"])
    ended = require_completed(service, submitted)
    assert {rollout.attempt for rollout in ended.values()} == {1}, (
        "a rollout goes on, it does not begin again"
    )
    failed = sum(rollout.metrics.get("failed_calls", 0) for rollout in ended.values())
    assert failed > 20, "it was killed in the middle of calls"
    tagged = [fields for _, fields in counts.xrange("results") if "kill" in fields["tags"]]
    assert Counter(fields["id"] for fields in tagged) == dict.fromkeys(ended, 1), "each ended once"
    dead = service.client.backend("fake1")
    assert not dead.healthy and not dead.reachable and dead.error
    assert all(call["state"] == "done" for name in ("fake0", "fake2") for call in calls_of(servers[name]))


def calls_of(server):
    return httpx.get(f"{server.url}/calls", timeout=PATIENCE_S).json()


def pace(factor, *servers):
    """Have calls take so many times as long: none may end before all have begun, on a slow machine either."""
    for server in servers:
        fault = {"kind": "slow", "factor": factor}
        httpx.post(f"{server.url}/fault", json=fault, timeout=PATIENCE_S).raise_for_status()


def test_a_backend_that_hangs_is_left_long_before_the_time_limit_of_a_call(service, fleet):
    servers = fleet(2, step_ms=40)
    submitted = service.client.submit(talk(30, turns=6, tag="hang"))
    wait_until(lambda: live_calls(servers["fake0"]) > 3, 120, "calls in the backend")
    os.kill(servers["fake0"].pid, signal.SIGSTOP)
    try:
        ended = require_completed(service, submitted)
        for rollout in ended.values():
            assert rollout.stage_seconds["run"] < rollout.request.limits.call_timeout_s / 3
        assert sum(rollout.metrics.get("moved_failover", 0) for rollout in ended.values()) > 3
        assert not service.client.backend("fake0").reachable
    finally:
        os.kill(servers["fake0"].pid, signal.SIGCONT)
    wait_until(lambda: service.client.backend("fake0").healthy, 120, "the backend to be taken again")


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "error", "status": 500},
        {"kind": "error", "status": 503},
        {"kind": "error", "status": 429},
        {"kind": "truncated"},
        {"kind": "cut"},
    ],
    ids=lambda fault: f"{fault['kind']}{fault.get('status', '')}",
)
def test_tokens_of_a_broken_call_are_discarded_and_the_call_is_made_elsewhere(service, fleet, fault):
    servers = fleet(2)
    httpx.post(f"{servers['fake0'].url}/fault", json={**fault, "calls": 6}).raise_for_status()
    tag = f"{fault['kind']}{fault.get('status', '')}"
    ended = require_completed(service, service.client.submit(talk(16, tag=tag)))
    assert sum(rollout.metrics.get("failed_calls", 0) for rollout in ended.values()) == 6


@pytest.mark.parametrize(("kind", "options", "least"), [("error", {}, 8), ("lie", {"step_ms": 5}, 9)])
def test_a_backend_whose_calls_fail_though_it_says_it_is_well_is_left_alone(
    service, fleet, kind, options, least
):
    """A lie costs no rollout and no token either."""
    servers = fleet(2, **options)
    httpx.post(f"{servers['fake0'].url}/fault", json={"kind": kind}).raise_for_status()
    submitted = service.client.submit(talk(40, tag=f"breaker-{kind}"))
    why = wait_until(lambda: service.client.backend("fake0").error, 120, "the circuit to open")
    assert "calls failed, though /health answers" in why
    ended = require_completed(service, submitted)
    for rollout in ended.values():
        assert rollout.attempt == 1
        sampled = [segment for segment in rollout.trajectory.chain.segments if segment.sampled]
        assert {segment.policy_version for segment in sampled} == {"default"}
    assert sum(rollout.metrics.get("failed_calls", 0) for rollout in ended.values()) >= least
    httpx.post(f"{servers['fake0'].url}/fault", json={"kind": "none"}).raise_for_status()
    wait_until(lambda: service.client.backend("fake0").healthy, 120, "the circuit to close")


def test_rollouts_wait_while_no_backend_is_left_and_go_on_with_the_same_tokens(service, fleet):
    servers = fleet(2, step_ms=30)
    pace(10, *servers.values())
    submitted = service.client.submit(talk(10, turns=5, tag="outage"))
    wait_until(lambda: all(live_calls(server) for server in servers.values()), 120, "calls in both")
    for server in servers.values():
        os.kill(server.pid, signal.SIGSTOP)
    try:
        wait_until(
            lambda: not any(backend.reachable for backend in service.client.backends()),
            60,
            "both to be found away",
        )
    finally:
        for server in servers.values():
            os.kill(server.pid, signal.SIGCONT)
    pace(1, *servers.values())
    require_completed(service, submitted)


def test_when_no_backend_comes_back_the_blame_is_infrastructure_and_there_is_no_reward(service, fleet):
    servers = fleet(1, step_ms=30)
    (rollout,) = service.client.submit(talk(1, turns=50, tag="gone", limits={"max_attempts": 1}))
    wait_until(lambda: live_calls(servers["fake0"]), 120, "a call in the backend")
    os.kill(servers["fake0"].pid, signal.SIGKILL)
    ended = service.client.wait(rollout.id, timeout=PATIENCE_S)
    assert (ended.state, ended.error.blame) == (State.FAILED, Blame.INFRASTRUCTURE)
    assert ended.drop and ended.reward is None
    check_counters(service)


def test_a_removed_backend_loses_its_rollouts_to_the_others_at_their_next_turn(service, fleet):
    servers = fleet(2, step_ms=30)
    pace(10, *servers.values())
    submitted = service.client.submit(talk(20, turns=6, tag="removed"))
    wait_until(lambda: live_calls(servers["fake0"]) > 3, 120, "calls in the backend")
    service.client.remove_backend("fake0")
    pace(1, *servers.values())
    ended = require_completed(service, submitted)
    assert {rollout.backend for rollout in ended.values()} == {"fake1"}
    service.client.add_backend(servers["fake0"].url, id="fake0")


def test_rollouts_beyond_the_capacity_wait_for_room_and_none_is_refused(service, fleet):
    (server,) = fleet(1, step_ms=10).values()
    pace(10, server)
    service.client.add_backend(server.url, id="fake0", max_rollouts=5)
    submitted = service.client.submit(talk(40, tag="room"))
    most = wait_until(lambda: service.client.backend("fake0").live_rollouts, 120, "one to be live")
    pace(1, server)
    while not all(service.client.get(rollout.id).state.terminal for rollout in submitted[-1:]):
        most = max(most, service.client.backend("fake0").live_rollouts)
        time.sleep(0.05)
    ended = require_completed(service, submitted)
    assert most <= 5
    assert any(rollout.metrics.get("backend_wait_s", 0) > 0.1 for rollout in ended.values())


def test_a_killed_worker_leaves_no_reservation_and_the_counters_stay_exact(service, fleet):
    servers = fleet(2, step_ms=30)
    pace(10, *servers.values())
    submitted = service.client.submit(talk(40, turns=6, tag="killed-worker"))
    redis = service.redis.client
    wait_until(lambda: redis.hlen("backends:pins") == 40, 120, "40 reservations")
    (worker,) = [
        process for process in service.processes if process.name == "run" and process.popen.poll() is None
    ]
    worker.kill()
    pace(1, *servers.values())
    wait_until(lambda: redis.hlen("backends:pins") == 0, 120, "the reservations to end with the leases")
    assert {backend.load for backend in service.client.backends()} == {0.0}
    service.start_worker("run", slots=256)
    require_completed(service, submitted)


def test_a_server_that_was_started_again_with_other_weights_is_noticed(service, fleet):
    (server,) = fleet(1).values()
    assert service.client.backend("fake0").policy_version == "default"
    httpx.post(f"{server.url}/update_weight_version", json={"new_version": "elsewhere"}).raise_for_status()
    wait_until(lambda: service.client.backend("fake0").policy_version == "elsewhere", 120, "the new version")
    (rollout,) = collect(service, service.client.submit(talk(1, tag="elsewhere"))).values()
    assert set(rollout.trajectory.policy_versions) <= {"elsewhere", None}

    def stats():
        return service.client.backend("fake0").stats

    # The last look at it may have been in the middle of the call.
    wait_until(lambda: stats().running == 0, 120, "a look at the idle server")
    assert stats().prompt_tokens is not None
