"""Scorer processes: what functions do wrong stays in their process, and none of it is an answer."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from rollout.schema import Blame
from services.settings import Settings
from tests.helpers.stack import ROOT, wait_until
from workers.scoring import (
    ScorerCrashed,
    ScorerError,
    ScorerOutOfMemory,
    ScorerPool,
    ScorerTimeout,
    metrics,
    process,
    score,
    score_or_blame,
)
from workers.scoring.pool import close
from workers.scoring.process import Scorer

MODULE = "tests.helpers.scorers"
PATIENCE_S = 120.0


@asynccontextmanager
async def scorers(size=1, memory_mb=1024, max_calls=1000):
    pool = ScorerPool(size=size, memory_mb=memory_mb, max_calls=max_calls)
    try:
        yield pool
    finally:
        pids = pool.pids
        pool.close()
        async with asyncio.timeout(PATIENCE_S):
            while any(Path(f"/proc/{pid}").exists() for pid in pids):  # not even zombies are left
                await asyncio.sleep(0.01)


def ended(pid):
    """Dead; what a scorer started may stay a zombie for as long as the machine's init likes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


async def ends_of(pids):
    async with asyncio.timeout(PATIENCE_S):
        while not all(map(ended, pids)):
            await asyncio.sleep(0.01)


async def written(path):
    async with asyncio.timeout(PATIENCE_S):
        while not (path.exists() and path.read_text()):
            await asyncio.sleep(0.02)
    return [int(word) for word in path.read_text().split()]


async def add(pool, a=1, b=2):
    return await pool.score(f"{MODULE}:add", {"a": a, "b": b}, timeout_s=PATIENCE_S)


def counted(function, outcome):
    registry = CollectorRegistry()
    registry.register(metrics.CALLS)
    labels = {"function": f"{MODULE}:{function}", "outcome": outcome}
    return registry.get_sample_value("rollout_worker_scorer_calls_total", labels) or 0


def asynchronous(test):
    """Run a coroutine as a test; pytest itself sees its fixtures through `__wrapped__`."""
    return functools.wraps(test)(lambda *args, **kwargs: asyncio.run(test(*args, **kwargs)))


@asynchronous
async def test_a_process_serves_many_calls_and_is_replaced_after_its_last():
    async with scorers(max_calls=3) as pool:
        answers = [await add(pool, number) for number in range(5)]
        assert [answer["sum"] for answer in answers] == [2, 3, 4, 5, 6]
        assert [answer["call"] for answer in answers] == [1, 2, 3, 1, 2]
        assert len({answer["pid"] for answer in answers}) == 2 and len(pool.pids) == 1


@pytest.mark.parametrize("size", [1, 2])
def test_200_concurrent_calls_share_a_few_processes_in_the_order_of_asking(size):
    async def body():
        async with scorers(size=size) as pool:
            order = []

            async def call(number):
                answer = await add(pool, number, number)
                order.append(number)
                return answer

            answers = await asyncio.gather(*(call(number) for number in range(200)))
            assert [answer["sum"] for answer in answers] == [2 * number for number in range(200)]
            assert len({answer["pid"] for answer in answers}) <= size
            assert size > 1 or order == list(range(200))

    asyncio.run(body())


@asynchronous
async def test_a_wait_for_a_free_process_counts_in_no_time_limit():
    async with scorers() as pool:
        await add(pool)
        limit_s = 5.0  # of which a call needs a tenth: the rest is for a busy machine
        calls = [pool.score(f"{MODULE}:sleep", limit_s / 10, timeout_s=limit_s) for _ in range(11)]
        assert len(set(await asyncio.gather(*calls))) == 1


@asynchronous
async def test_the_event_loop_goes_on_while_a_process_starts_and_works(tmp_path):
    async with scorers() as pool:
        call = asyncio.ensure_future(
            pool.score(f"{MODULE}:mark_and_hang", str(tmp_path / "pid"), timeout_s=PATIENCE_S)
        )
        await written(tmp_path / "pid")  # by steps of this very loop
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


@asynchronous
async def test_a_function_that_hangs_is_killed_with_what_it_started_at_its_limit(tmp_path):
    async with scorers() as pool:
        await add(pool)
        (pid,) = pool.pids
        before = counted("forks_and_hangs", "timeout")
        with pytest.raises(ScorerTimeout, match=r"forks_and_hangs took longer than 8 s") as caught:
            await pool.score(f"{MODULE}:forks_and_hangs", str(tmp_path / "pids"), timeout_s=8)
        assert caught.value.blame is Blame.INFRASTRUCTURE and caught.value.retry
        assert counted("forks_and_hangs", "timeout") == before + 1
        await ends_of([pid, *await written(tmp_path / "pids")])
        assert (await add(pool))["pid"] != pid


@asynchronous
async def test_a_cancel_kills_the_process_and_frees_its_place(tmp_path):
    async with scorers() as pool:
        call = asyncio.ensure_future(
            pool.score(f"{MODULE}:forks_and_hangs", str(tmp_path / "pids"), timeout_s=PATIENCE_S)
        )
        pids = [*await written(tmp_path / "pids"), *pool.pids]
        waiting = asyncio.ensure_future(add(pool))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await ends_of(pids)
        assert (await waiting)["sum"] == 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exits", r"exited with 9; it last printed:\nlast words"),
        ("segfault", r"killed by SIGSEGV; it last printed:\n(.|\n)*Segmentation fault(.|\n)*in segfault"),
        ("eat_memory", r"ran out of memory \(ROLLOUT_SCORER_MEMORY_MB=256\)"),
    ],
)
def test_a_function_that_ends_its_process_has_crashed_and_the_next_call_goes_well(function, message):
    async def body():
        async with scorers(memory_mb=256) as pool:
            with pytest.raises(ScorerCrashed, match=message) as caught:
                await pool.score(f"{MODULE}:{function}", None, timeout_s=PATIENCE_S)
            assert caught.value.blame is Blame.INFRASTRUCTURE and caught.value.retry
            assert (await add(pool))["sum"] == 3

    asyncio.run(body())


@asynchronous
async def test_a_function_that_fails_is_the_handlers_fault_and_its_process_goes_on():
    async with scorers() as pool:
        (pid,) = {(await add(pool))["pid"]}
        with pytest.raises(ScorerError, match="cannot judge x") as caught:
            await pool.score(f"{MODULE}:fail", "x\ud800", timeout_s=PATIENCE_S)
        str(caught.value).encode()
        assert caught.value.blame is Blame.HANDLER and not caught.value.retry
        assert "in fail" in str(caught.value)
        for function, message in [
            (f"{MODULE}:leave", "SystemExit"),
            (f"{MODULE}:no_json", "the result is no JSON"),
            (f"{MODULE}:missing", "has no attribute 'missing'"),
            ("no_such_module:judge", "No module named 'no_such_module'"),
            ("no_such_module", "not of the form"),
        ]:
            with pytest.raises(ScorerError, match=message):
                await pool.score(function, None, timeout_s=PATIENCE_S)
        with pytest.raises(ScorerError, match="the payload is no JSON"):
            await pool.score(f"{MODULE}:add", {"a": object()}, timeout_s=PATIENCE_S)
        assert (await add(pool))["pid"] == pid


@asynchronous
async def test_a_process_whose_function_left_processes_behind_is_replaced(tmp_path):
    async with scorers() as pool:
        pid = await pool.score(f"{MODULE}:forks", str(tmp_path / "pids"), timeout_s=PATIENCE_S)
        await ends_of([pid, *await written(tmp_path / "pids")])
        assert (await add(pool))["pid"] != pid


@asynchronous
async def test_a_fork_that_comes_back_from_the_function_does_not_answer():
    async with scorers() as pool:
        for _ in range(3):
            assert await pool.score(f"{MODULE}:fork_returns", None, timeout_s=PATIENCE_S) > 0
            assert (await add(pool))["sum"] == 3


@asynchronous
async def test_what_a_function_prints_is_no_answer_and_does_not_stall_it():
    async with scorers() as pool:
        assert await pool.score(f"{MODULE}:noise", None, timeout_s=PATIENCE_S) == "quiet"


@asynchronous
async def test_payloads_and_answers_may_be_much_larger_than_a_socket_holds():
    async with scorers() as pool:
        half = "ä\ud800" * 1_000_000
        assert (await add(pool, half, half))["sum"] == half * 2


@asynchronous
async def test_an_alarm_rings_in_the_function_and_never_after_it():
    async with scorers() as pool:
        assert await pool.score(f"{MODULE}:alarm", 0.05, timeout_s=PATIENCE_S) == "rang"
        pid = await pool.score(f"{MODULE}:leave_alarm", 0.2, timeout_s=PATIENCE_S)
        assert await pool.score(f"{MODULE}:sleep", 0.5, timeout_s=PATIENCE_S) == pid


@asynchronous
async def test_a_process_that_holds_on_to_much_memory_is_replaced_and_cannot_take_more():
    async with scorers(memory_mb=512) as pool:
        pid = await pool.score(f"{MODULE}:keep_memory", 300, timeout_s=PATIENCE_S)
        assert (await add(pool))["pid"] != pid
        with pytest.raises(ScorerOutOfMemory):
            await pool.score(f"{MODULE}:keep_memory", 600, timeout_s=PATIENCE_S)


@asynchronous
async def test_an_idle_process_that_died_costs_the_next_call_nothing():
    async with scorers() as pool:
        for noticed in (False, True):
            await add(pool)
            (pid,) = pool.pids
            os.kill(pid, signal.SIGKILL)
            if noticed:
                await asyncio.sleep(0.05)
            assert (await add(pool))["pid"] != pid


def test_the_number_of_a_dead_process_stays_its_own_until_its_group_is_killed():
    scorer = Scorer(1024)
    try:
        os.kill(scorer.pid, signal.SIGKILL)
        wait_until(lambda: scorer.gone, PATIENCE_S, "it to have ended")
        time.sleep(0.2)  # in which its listener could have collected it
        assert Path(f"/proc/{scorer.pid}").exists()
    finally:
        scorer.end()
    wait_until(lambda: not Path(f"/proc/{scorer.pid}").exists(), PATIENCE_S, "it to be collected")
    assert scorer.gone


@asynchronous
async def test_a_scorer_sees_no_setting_and_no_secret_of_the_service(monkeypatch):
    names = dict.fromkeys(("ROLLOUT_REDIS_URL", "WANDB_API_KEY", "CELERY_BROKER_URL", "DSN", "SITE_CODE"))
    names |= {"LANG": "en", "LC_NUMERIC": "en", "TZ": "en"}
    for name in names:
        monkeypatch.setenv(name, "en")
    async with scorers() as pool:
        assert await pool.score(f"{MODULE}:environment", list(names), timeout_s=PATIENCE_S) == names


@asynchronous
async def test_a_scorer_has_no_network_no_privileges_and_no_view_of_its_parent():
    async with scorers() as pool:
        view = await pool.score(f"{MODULE}:surroundings", None, timeout_s=PATIENCE_S)
    assert view["interfaces"] == ["lo"]
    assert set(view["capabilities"].values()) == {"0000000000000000"} and view["no_new_privileges"] == "1"
    assert view["uid"] == os.getuid()
    assert view["parent"] == "FileNotFoundError"
    assert len(view["processes"]) == 1


def test_without_namespaces_scorers_work_and_that_is_said(monkeypatch):
    warnings = []
    monkeypatch.setattr(process, "_warned", False)
    monkeypatch.setattr(process.log, "warning", lambda text, **_: warnings.append(text), raising=False)
    process.warn_of("this machine gives no user namespace: no")
    process.warn_of("this machine gives no user namespace: no")
    assert len(warnings) == 1 and "NETWORK" in warnings[0]


@asynchronous
async def test_what_crashes_its_scorer_twice_is_the_answers_fault_and_once_is_nobodys(tmp_path):
    numbers = {"a": 1, "b": 1}
    crash = {"path": str(tmp_path / "crashed"), "times": 5}
    judge = functools.partial(score_or_blame, f"{MODULE}:crash_or_add", known=numbers, timeout_s=PATIENCE_S)
    assert await judge(crash) is None
    once = {"path": str(tmp_path / "once"), "times": 1, **numbers}
    assert await judge(once) == 2
    close()


def test_event_loops_have_the_same_processes_until_they_are_closed():
    """Who runs handlers by `asyncio.run` has many loops."""

    def once():
        call = score(f"{MODULE}:add", {"a": 1, "b": 2}, timeout_s=PATIENCE_S)
        return asyncio.run(call)["pid"]

    close()
    first = once()
    assert once() == first
    close()
    wait_until(lambda: not Path(f"/proc/{first}").exists(), PATIENCE_S, "the scorer to end")
    assert once() != first
    close()


@asynchronous
async def test_calls_at_work_and_in_line_when_the_processes_are_closed_fail_and_leave_none(tmp_path):
    async with scorers() as pool:
        calls = [
            asyncio.ensure_future(
                pool.score(f"{MODULE}:mark_and_hang", str(tmp_path / name), timeout_s=PATIENCE_S)
            )
            for name in "ab"
        ]
        pids = await written(tmp_path / "a")
        pool.close()
        for call in calls:
            with pytest.raises(ScorerCrashed, match="were closed"):
                await call
        assert not pool.pids and not (tmp_path / "b").exists()
        await ends_of(pids)


def test_the_settings_say_how_many_and_how_large():
    pool = ScorerPool.of(Settings(scorers=3, scorer_memory_mb=256, scorer_calls=7))
    assert (pool.size, pool.memory_mb, pool.max_calls) == (3, 256, 7)
    assert ScorerPool.of(Settings()).size == os.cpu_count()


WORKER = """
import asyncio, sys, threading
from workers.scoring import score

# As a worker does it: the event loop is in a thread of its own.
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
call = score("tests.helpers.scorers:forks_and_hangs", sys.argv[1], timeout_s=3600)
asyncio.run_coroutine_threadsafe(call, loop).result()
"""


def test_a_worker_killed_with_sigkill_leaves_no_scorer(tmp_path):
    """Nor what the function forked. What it started as a program of its own, it must itself end."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    worker = subprocess.Popen([sys.executable, str(script), str(tmp_path / "pids")], env=env)
    programs = []
    try:
        wait_until(
            lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text(), PATIENCE_S, "the fork"
        )
        fork, *programs = map(int, (tmp_path / "pids").read_text().split())
        scorer = int(Path(f"/proc/{fork}/stat").read_text().rsplit(")", 1)[1].split()[1])
        worker.kill()
        worker.wait(PATIENCE_S)
        wait_until(lambda: ended(scorer) and ended(fork), PATIENCE_S, "the scorer and its fork to end")
    finally:
        worker.kill()
        worker.wait(PATIENCE_S)
        for program in programs:
            os.kill(program, signal.SIGKILL)


def test_the_scorer_process_imports_nothing_of_the_worker():
    """It is started often, and its memory is counted."""
    code = "import sys, workers.scoring.child; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    heavy = {"pydantic", "structlog", "celery", "redis", "asyncio.events.x", "prometheus_client", "rollout"}
    assert not heavy & set(loaded.stdout.split())
    assert "workers.scoring.wire" in loaded.stdout.split()


def test_a_wait_is_measured_apart_from_the_work():
    async def body():
        async with scorers() as pool:
            started = time.monotonic()
            # The worker counts from when it hears of the start, which on a busy machine it does late.
            await pool.score(f"{MODULE}:sleep", 2.0, timeout_s=PATIENCE_S)
            return time.monotonic() - started

    registry = CollectorRegistry()
    registry.register(metrics.SECONDS)

    def total():
        labels = {"function": f"{MODULE}:sleep"}
        return registry.get_sample_value("rollout_worker_scorer_seconds_sum", labels) or 0

    before = total()
    took = asyncio.run(body())
    assert 0.01 <= total() - before < took
