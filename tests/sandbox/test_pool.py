"""Sandboxes started ahead: given at once, used once, kept only while somebody asks for their kind."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from sandbox import processes
from sandbox.config import HostConfig
from sandbox.container import Container
from sandbox.errors import SandboxRequestError, SandboxStartError
from sandbox.pool import Kind, WarmPool
from sandbox.runtimes import RUNTIMES, Launch
from sandbox.spec import BindSpec, Limits, SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient
from tests.helpers.stack import wait_until
from tests.sandbox.conftest import run


@pytest.fixture
def spec(anything) -> SandboxSpec:
    return SandboxSpec(runtime=anything)


@pytest.fixture
def pool(state, monkeypatch):
    """Starts a host that keeps two ready; more settings by name."""

    def make(**settings: int) -> SyncHostClient:
        for name, value in {"warm": 2, **settings}.items():
            monkeypatch.setenv(f"ROLLOUT_SANDBOX_{name.upper()}", str(value))
        return SyncHostClient(state)

    return make


@pytest.fixture
def host(pool, spec) -> SyncHostClient:
    """One of which one sandbox was asked for, and two like it are ready."""
    client = pool()
    client.start(spec)
    warm(client, 2)
    return client


def warm(host: SyncHostClient, count: int) -> None:
    """Wait until so many are ready."""
    deadline = time.monotonic() + 120
    while (ready := host.stats()["warm"]) != count:
        assert time.monotonic() < deadline, f"{ready} warm sandboxes instead of {count}"
        time.sleep(0.02)


# -- in this process ----------------------------------------------


class Ahead:
    """A pool on a clock of its own; `works` says of each start, in order, whether it succeeds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, works: Iterable[bool], **settings: int) -> None:
        monkeypatch.setattr("sandbox.pool.time", SimpleNamespace(monotonic=lambda: self.now))
        self.now = 0.0
        self.busy = False
        self.starts: list[tuple[str, float]] = []
        """Image and time of each."""
        self.discarded: list[str] = []
        self._works = iter(works)
        config = HostConfig(**{"warm": 2, "warm_idle_s": 10**6, **settings})
        self.pool = WarmPool(config, self._boot, lambda box: self.discarded.append(box.id), lambda: self.busy)

    @staticmethod
    def kind(image: str) -> Kind:
        return Kind(image, "apptainer", None, None, "none", Limits(), ())

    async def _boot(self, kind: Kind) -> Container:
        self.starts.append((kind.image, self.now))
        if not next(self._works):
            raise SandboxStartError("its image is broken")
        name = f"{kind.image}{len(self.starts)}"
        launch = Launch(name, Path("w"))
        return Container(name, RUNTIMES["apptainer"](), SandboxSpec(), launch, Limits())

    async def ask(self, image: str, count: int | None = None) -> None:
        self.pool.asked(self.kind(image), count)
        await self.settle()

    async def settle(self) -> None:
        """Let what can start do so."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.pool.tidy()
            await self.settle()


def test_after_failed_starts_the_next_is_tried_later_and_later_until_one_succeeds(monkeypatch):
    ahead = Ahead(monkeypatch, works=[False] * 8 + [True] + [False] * 10)

    async def scenario():
        await ahead.ask("broken")
        await ahead.wait(930)

    run(scenario())
    times = [time for _, time in ahead.starts]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 0, 5, 10]


def test_nothing_is_started_ahead_while_somebody_waits_for_a_start(monkeypatch):
    ahead = Ahead(monkeypatch, works=itertools.repeat(True))

    async def scenario():
        ahead.busy = True
        await ahead.ask("a")
        assert ahead.starts == []
        ahead.busy = False
        await ahead.wait(1)
        assert ahead.pool.ready() == 2

    run(scenario())


def test_kinds_that_want_more_than_is_kept_have_a_share_each(monkeypatch):
    ahead = Ahead(monkeypatch, works=itertools.repeat(True), warm_total=3)

    async def scenario():
        await ahead.ask("a")
        await ahead.wait(1)
        await ahead.ask("b")
        assert ahead.pool.ready() == 3 and ahead.discarded == ["a1"]  # no more than it takes
        await ahead.ask("b", count=100)
        assert ahead.pool.ready() == 3 and ahead.discarded == ["a1"]  # a wants two and b three
        await ahead.ask("a")
        assert ahead.pool.ready() == 3 and len(ahead.discarded) == 2  # who asked last has the larger part

    run(scenario())


def test_as_many_are_kept_as_the_last_bursts_took(monkeypatch):
    ahead = Ahead(monkeypatch, works=itertools.repeat(True), warm_total=12)

    async def scenario():
        for _ in range(9):
            await ahead.ask("a")
        await ahead.wait(1)
        assert ahead.pool.ready() == 9
        await ahead.wait(20)
        await ahead.ask("a")  # a single one does not make it forget
        await ahead.wait(20)
        assert ahead.pool.ready() == 9
        await ahead.wait(60)
        assert ahead.pool.ready() == 2

    run(scenario())


def test_one_that_is_ended_or_being_ended_is_not_given(monkeypatch):
    ahead = Ahead(monkeypatch, works=itertools.repeat(True), warm=3)

    async def scenario():
        await ahead.ask("a")
        ended, ending, fine = list(ahead.pool._shelves[ahead.kind("a")].ready)
        ended.exited.set()
        ending.ending = asyncio.create_task(asyncio.sleep(0))
        assert ahead.pool.take(ahead.kind("a")) is fine
        assert ahead.pool.take(ahead.kind("a")) is ahead.pool.take(ahead.kind("b")) is None

    run(scenario())


def test_what_nobody_asks_for_any_more_is_ended_and_started_anew_when_somebody_does(monkeypatch):
    ahead = Ahead(monkeypatch, works=itertools.repeat(True), warm_idle_s=8)

    async def scenario():
        await ahead.ask("a")
        await ahead.wait(8)
        assert ahead.pool.ready() == 2
        await ahead.wait(1)
        assert ahead.pool.ready() == 0 and ahead.discarded == ["a1", "a2"]
        await ahead.ask("a")
        await ahead.wait(1)
        assert ahead.pool.ready() == 2

    run(scenario())


# -- of a host ----------------------------------------------


def test_the_second_claim_of_a_kind_is_warm_and_has_all_that_was_asked_for(host, spec, state):
    (first,) = host.list()
    assert not first["warm"]
    asked = SandboxSpec(
        runtime=spec.runtime,
        env={"GREETING": "it's"},
        files={"a/b.txt": "text"},
        owner="me",
        max_lifetime_s=100,
    )
    info = host.start(asked)
    assert info.warm and info.owner == "me" and info.id != first["id"]
    (listed,) = [box for box in host.list() if box["id"] == info.id]
    assert listed["seconds_left"] <= 100
    with SyncSandboxClient(info.socket) as client:
        result = client.bash('echo "$GREETING"; cat a/b.txt; touch a/b.txt a/mine')
        assert (result.output, result.exit_code) == ("it's\ntext", 0)
        client.bash("exit")
        assert client.bash("echo $GREETING").output == "it's\n"  # of a new shell, too
    warm(host, 2)  # refilled
    stats = host.stats()
    assert (stats["claimed"], stats["claimed_warm"]) == (2, 1)
    host.stop()
    assert not list((state / "scratch").glob("*"))


def test_another_kind_is_not_served_from_the_pool(host, spec):
    for options in ({"limits": Limits(memory_mb=100)}, {"network": "host"}, {"ipython": True}):
        info = host.start(SandboxSpec(runtime=spec.runtime, **options))
        assert not info.warm


def test_many_claims_at_once_each_get_a_sandbox_of_their_own(host, spec):
    with ThreadPoolExecutor(6) as threads:
        infos = list(threads.map(host.start, [spec] * 6))
    assert len({info.id for info in infos}) == 6
    assert sum(info.warm for info in infos) >= 2


def first_process(state: Path, sandbox_id: str) -> int:
    """As the host has written it down."""
    return json.loads((state / "records" / f"{sandbox_id}.json").read_text())["pid"]


def test_warm_ones_that_nobody_asks_for_are_ended_by_the_host(pool, spec, state):
    host = pool(warm_idle_s=8)
    host.release(host.start(spec).id)

    def asked_for() -> bool:
        """Whether both are ready; till then they are asked for, or one might end before the other starts."""
        host.keep_warm(spec, 2)
        return host.stats()["warm"] == 2

    wait_until(asked_for, 120, "two warm sandboxes")
    pids = [first_process(state, path.name) for path in (state / "scratch").iterdir()]
    warm(host, 0)
    wait_until(lambda: not list((state / "scratch").iterdir()), 120, "what they wrote to be gone")
    assert len(pids) == 2 and not any(map(processes.start_time, pids))


def test_a_warm_one_that_died_is_not_given(host, spec, state):
    claimed = {box["id"] for box in host.list()}
    for directory in list((state / "scratch").iterdir()):
        if directory.name not in claimed:
            # From outside: nothing inside can.
            pid = first_process(state, directory.name)
            processes.send([pid, *processes.descendants(pid)])
    info = host.start(spec)
    with SyncSandboxClient(info.socket) as client:
        assert client.bash("echo fine").output == "fine\n"
    warm(host, 2)


def test_a_refused_claim_costs_the_warm_one_and_nothing_else(host, spec):
    bad = SandboxSpec(runtime=spec.runtime, env={"not a name": "x"})
    with pytest.raises(SandboxRequestError, match="not a name"):
        host.start(bad)
    with pytest.raises(SandboxRequestError, match="outside the workspace"):
        host.start(SandboxSpec(runtime=spec.runtime, files={"../x": ""}))
    assert host.start(spec).id
    warm(host, 2)
    assert host.stats()["claimed"] == 2


def test_a_warm_one_does_not_show_what_had_a_bound_place_s_name_before(pool, spec, monkeypatch):
    place = Path(tempfile.mkdtemp(prefix="sbxb-", dir="/tmp"))
    place.chmod(0o755)
    monkeypatch.setenv("ROLLOUT_SANDBOX_BINDS", f"{place}:ro")

    def fill(text: str) -> None:
        (place / "data").mkdir()
        (place / "data").chmod(0o755)
        (place / "data" / "said").write_text(text)

    fill("old")
    host = pool()
    bound = SandboxSpec(runtime=spec.runtime, binds=(BindSpec(str(place / "data"), "/data"),))
    host.keep_warm(bound, 1)
    warm(host, 1)
    (place / "data").rename(place / "old")
    fill("new")
    info = host.start(bound)
    with SyncSandboxClient(info.socket) as client:
        assert client.bash("cat /data/said").output == "new"
    assert not info.warm
    shutil.rmtree(place)


@pytest.mark.apptainer
def test_a_kernel_of_a_warm_sandbox_is_ready(pool):
    host = pool()
    spec = SandboxSpec(runtime="apptainer", ipython=True)
    host.keep_warm(spec, 1)
    warm(host, 1)
    info = host.start(spec)
    assert info.warm
    with SyncSandboxClient(info.socket) as client:
        assert client.ipython("6 * 7").output == "42\n"
