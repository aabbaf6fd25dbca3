"""The life of a job, from its signals to its end; no cluster and no Redis are needed."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.launch import SlurmError, parts
from services.launch.slurm import job as jobs
from services.launch.slurm import node, place
from services.launch.slurm.engine import EngineJob
from services.launch.slurm.head import HeadJob
from services.launch.slurm.job import MemberJob
from services.launch.slurm.node import NodeJob
from services.launch.slurm.place import Place, Scratch
from services.launch.slurm.plan import HEAD
from services.launch.slurm.rundir import DRAINING, UP, Head, Member, RunDir
from services.launch.supervisor import Part
from tests.helpers.slurm_commands import Commands
from tests.helpers.stack import wait_until

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
BUSY_S = 60.0


@pytest.fixture
def run_dir(tmp_path, scratch, monkeypatch):
    """The job's own; what it asks of `scontrol` is noted."""
    commands = Commands(tmp_path, monkeypatch)
    monkeypatch.setenv("ROLLOUT_SLURM_SCRATCH", str(scratch))
    monkeypatch.setenv("ROLLOUT_SLURM_RENEW", "1")
    monkeypatch.setattr(jobs, "LOOK_S", 0.01)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    run = RunDir(tmp_path / "run")
    run.make()
    run.commands = commands
    run.requeued = lambda: [said for said in commands.called("scontrol") if "show" not in said]
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


class Job(MemberJob):
    """Carries nothing, and is never idle."""

    looks = 0

    def __init__(self, run: RunDir) -> None:
        super().__init__(run, Place("n1", "7"), "node")

    def _start_programs(self) -> None:
        self._publish()

    def _is_drained(self) -> bool:
        self.looks += 1
        return False

    def _stop(self) -> None:
        pass


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


def later(what, *arguments):
    """From another thread, and not before the job listens in this one: a signal would end the process."""

    def listens():
        return getattr(signal.getsignal(signal.SIGINT), "__func__", None) is jobs.Supervisor._hear

    def do():
        wait_until(listens, BUSY_S, "the job to listen")
        what(*arguments)

    threading.Timer(0.3, do).start()


def test_near_its_time_limit_a_job_drains_leaves_nothing_and_queues_again(run_dir, scratch, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SLURM_DRAIN_S", "0.2")
    job = Job(run_dir)
    later(send, signal.SIGUSR1)
    assert job.run() == 0
    assert job.looks > 0 and job.member.state == DRAINING
    assert run_dir.requeued() == ["requeue 7"]
    assert run_dir.members() == [] and list(scratch.iterdir()) == []


def test_a_node_whose_limit_is_near_while_there_is_no_head_queues_again(run_dir):
    later(send, signal.SIGUSR1)
    assert NodeJob(run_dir, Place("n1", "7"), ["run"]).run() == 0
    assert run_dir.requeued() == ["requeue 7"]


@pytest.mark.parametrize("role", ["node", "engine"])
def test_a_job_that_still_starts_ends_when_the_service_goes_down(run_dir, monkeypatch, role):
    """The node waits for a head, the engine for its server."""
    monkeypatch.setenv("ROLLOUT_SLURM_ENGINE_COMMAND", "sleep 900")
    monkeypatch.setenv("ROLLOUT_SLURM_ADDRESS", "127.0.0.1")
    place = Place("n1", "7", step=True)
    job = NodeJob(run_dir, place, ["run"]) if role == "node" else EngineJob(run_dir, place)
    later(run_dir.ask_to_drain, HEAD, 0.0)
    assert job.run() == 0
    assert job.supervisor.parts == {} and run_dir.requeued() == []


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGUSR1, signal.SIGTERM)])
def test_a_job_that_is_cancelled_ends_at_once_and_does_not_queue_again(run_dir, numbers):
    job = Job(run_dir)
    later(send, *numbers)
    assert job.run() == 0
    assert run_dir.requeued() == [] and run_dir.members() == []


@pytest.mark.parametrize("numbered", [True, False], ids=["", "by_the_first_release"])
def test_a_head_takes_redis_data_only_when_the_job_that_has_it_has_ended(run_dir, tmp_path, numbered):
    listed, head = tmp_path / "jobs", HeadJob(run_dir, Place("n1", "7"))

    def has_it(state):
        listed.write_text(f"6|6|6|{state}|n9|None|1:00\n")

    turn = 1 if numbered else 0
    if numbered:
        run_dir.take_data(turn, "6")
    else:
        run_dir.redis.mkdir()
        run_dir.write_private(run_dir.redis / "job", "6\n")
    (run_dir.redis / "job.1~").touch()  # of somebody's editor
    has_it("RUNNING")
    with pytest.raises(SlurmError, match=r"job 6 is the head of .* already"):
        head.run()
    has_it("COMPLETING")
    later(send, signal.SIGTERM)
    assert head.run() == 0
    assert run_dir.data_holder() == (turn, "6") and run_dir.head() is None and head.supervisor.parts == {}
    threading.Timer(1.5, has_it, ["CANCELLED"]).start()
    head = HeadJob(run_dir, Place("n1", "8"))
    head._prepare()
    assert "CANCELLED" in listed.read_text() and run_dir.data_holder() == (turn + 1, "8")


@pytest.mark.parametrize("before", ["", "6"])
def test_of_heads_that_look_in_the_same_moment_one_takes_redis_data(run_dir, tmp_path, monkeypatch, before):
    """Job 6 was killed; jobs 7 and 8 were submitted by hand, in the same second."""
    (tmp_path / "jobs").write_text("7|7|7|RUNNING|n1|None|1:00\n8|8|8|RUNNING|n2|None|1:00\n")
    if before:
        run_dir.take_data(1, before)
    both, look = threading.Barrier(2, timeout=BUSY_S), RunDir.data_holder
    first = threading.local()

    def look_together(self):
        seen = look(self)
        if not hasattr(first, "done"):
            first.done = both.wait()
        return seen

    heads = [HeadJob(RunDir(run_dir.path), Place(node, job)) for node, job in (("n1", "7"), ("n2", "8"))]
    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(RunDir, "data_holder", look_together)
        errors = [call.exception() for call in [pool.submit(head._prepare) for head in heads]]
    winner, loser = sorted(heads, key=lambda head: errors[heads.index(head)] is not None)
    turn, job = run_dir.data_holder()
    assert (turn, job) == (2 if before else 1, winner.place.job)
    assert f"job {job} is the head of {run_dir.path} already" in str(errors[heads.index(loser)])
    loser._end()
    assert run_dir.data_holder() == (turn, job), "what it never had is not its to leave"
    winner._end()
    assert run_dir.data_holder() == (turn, "")


def test_a_head_that_was_queued_again_takes_redis_data_anew(run_dir):
    run_dir.take_data(1, "7")
    head = HeadJob(run_dir, Place("n1", "7"))
    head._prepare()
    assert run_dir.data_holder() == (2, "7")
    head._end()
    assert run_dir.data_holder() == (2, "")


def test_a_head_that_lives_shows_it_by_the_time_of_its_file(run_dir):
    head = HeadJob(run_dir, Place("n1", "7"))
    file = run_dir.path / "head.json"
    file.touch()
    for _ in range(2):
        os.utime(file, (1, 1))
        head._tend()
        assert file.stat().st_mtime > 1


def test_a_job_that_is_asked_to_end_does_so_within_its_grace_and_does_not_queue_again(run_dir):
    job = Job(run_dir)
    later(run_dir.ask_to_drain, job.name, 0.1)
    assert job.run() == 0
    assert job.looks > 0 and run_dir.requeued() == []
    assert run_dir.asked_to_drain(job.name) is None


def test_whoever_asks_last_says_how_long_a_drain_may_take(run_dir):
    job = Job(run_dir)
    run_dir.ask_to_drain(job.name, BUSY_S)
    later(run_dir.ask_to_drain, job.name, 0.0)
    with_limit = threading.Timer(BUSY_S / 2, send, [signal.SIGALRM])
    with_limit.start()
    assert job.run() == 0
    assert with_limit.is_alive()
    with_limit.cancel()


def test_a_step_is_told_of_its_time_limit_by_a_file_and_leaves_the_queue_to_its_job(run_dir, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SLURM_DRAIN_S", "0.1")
    job = Job(run_dir)
    job.place = Place("n1", "7", step=True)
    later((run_dir.path / "control" / "7.ends").touch)
    assert job.run() == 0
    assert job.looks > 0 and run_dir.requeued() == []


def test_a_job_goes_on_while_the_run_directory_cannot_be_read(run_dir):
    job = Job(run_dir)
    (run_dir.path / "control" / "n1-job7.json").write_text("{")
    later(send, signal.SIGTERM)
    assert job.run() == 0


def test_workers_of_a_node_start_anew_when_the_head_s_capture_has_moved(run_dir, monkeypatch):
    monkeypatch.setattr(node, "ping", lambda url: None)
    monkeypatch.setattr(parts, "fleet", lambda stage, slots, name: Part(f"{stage} fleet", ["sleep", "900"]))
    head = Head("1", "n9", "127.0.0.1", UP, "http://127.0.0.1:9", "", 6379)
    run_dir.redis.mkdir()
    run_dir.write_capture_url("http://127.0.0.1:8090")
    run_dir.write_head(head)
    job = NodeJob(run_dir, Place("n1", "7"), ["run"])
    try:
        job._start_workers(job._addresses(head))
        before = job.supervisor.parts["run fleet"]
        job._tend()
        assert job.supervisor.parts["run fleet"] is before and before.alive
        run_dir.write_capture_url("http://127.0.0.1:8091")
        job._tend()
        after = job.supervisor.parts["run fleet"]
        assert after.alive and not before.alive
        assert after.env["ROLLOUT_CAPTURE_URL"] == "http://127.0.0.1:8091"
        assert after.env["ROLLOUT_REDIS_URL"] == before.env["ROLLOUT_REDIS_URL"]
    finally:
        job.supervisor.stop_all(5.0)


@pytest.mark.parametrize(
    ("status", "preempted", "within"),
    [
        (143, "at once", (10, 18.1)),
        (143, "at the third look", (10, 18.1)),
        (143, "no", (10, 18.1)),
        (1, "at once", (10, 18.1)),
        (143, None, (5, 13.1)),
    ],
    ids=["preempted", "Slurm says it late", "cancelled", "no step can run", "Slurm does not say"],
)
def test_a_node_that_is_preempted_has_its_rollouts_leave_within_the_grace_and_waits_for_slurm(
    run_dir, tmp_path, monkeypatch, status, preempted, within
):
    """Slurm's side is played: the step ends with `status`, and of the job this is said."""
    monkeypatch.setattr(node, "ping", lambda url: None)
    monkeypatch.setattr(parts, "fleet", lambda stage, slots, name: Part(f"{stage} fleet", ["sleep", "900"]))
    moved: list[float] = []
    monkeypatch.setattr(node, "hand_back", lambda *_, within_s, state_dir: moved.append(within_s) or 3)
    now, go = int(time.time()), tmp_path / "go"
    run_dir.commands.write("srun", f"while [ ! -e {go} ]; do sleep 0.02; done; exit {status}")
    looks = {"at once": 0, "at the third look": 2, "no": 1000, None: 0}[preempted]
    said = (
        f"JobId=7 ArrayJobId=7 StartTime={now - 60} EndTime={now + 20} PreemptTime={now}" if preempted else ""
    )
    before = f"JobId=7 ArrayJobId=7 StartTime={now - 60} EndTime={now + 1800} PreemptTime=None"
    called = f"$(grep -c '^scontrol.*show' {tmp_path}/called)"
    # It is the task of an array that has the array's id.
    other = f"echo JobId=8 ArrayJobId=7 StartTime={now - 60} EndTime={now + 900} PreemptTime=None"
    shown = f"if [ {called} -gt {looks} ]; then echo {said}; else echo {before}; fi; {other if said else ':'}"
    run_dir.commands.write("scontrol", shown)
    run_dir.redis.mkdir()
    run_dir.write_head(Head("1", "n9", "127.0.0.1", UP, "http://127.0.0.1:9", "", 1))
    job = NodeJob(run_dir, Place("n1", "7"), ["run"])
    hears = status == 143 and preempted != "no"

    def play():
        wait_until(lambda: "notice" in job.supervisor.parts, BUSY_S, "the step")
        step = job.supervisor.parts["notice"]
        go.touch()
        wait_until(lambda: job.supervisor.parts.get("notice") is not step, BUSY_S, "its end to be noticed")
        if hears:
            wait_until(lambda: run_dir.members() == [], BUSY_S, "the node's end")
        time.sleep(0.2)
        assert bool(moved) == hears and job.preempted == hears
        send(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        slurm = pool.submit(play)
        assert job.run() == 0
        slurm.result()
    assert run_dir.requeued() == []
    assert within[0] < moved[0] < within[1], moved


def test_a_job_that_has_ended_says_nothing_of_itself_any_more(run_dir):
    job = Job(run_dir)
    job._publish()
    assert [member.name for member in run_dir.members()] == ["n1-job7"]
    job._end()
    job._publish()
    assert run_dir.members() == []


def test_a_member_tells_of_programs_that_keep_ending(run_dir, monkeypatch):
    monkeypatch.setattr(jobs.Supervisor, "failing", lambda self: {"run fleet": "exit code 1"})
    job = Job(run_dir)
    members: list[Member] = []

    def look():
        wait_until(lambda: any(member.failing for member in run_dir.members()), BUSY_S, "it is told")
        members.extend(run_dir.members())
        send(signal.SIGTERM)

    watcher = threading.Thread(target=look)
    watcher.start()
    assert job.run() == 0
    watcher.join()
    assert [member.failing for member in members] == [{"run fleet": "exit code 1"}]


def test_a_directory_that_somebody_else_could_have_made_is_refused_as_scratch(scratch):
    name = f"sbx-{os.getuid()}-abcdef"
    (scratch / f"{name}-1").mkdir(mode=0o777)
    (scratch / f"{name}-1").chmod(0o777)
    (scratch / "elsewhere").mkdir(mode=0o700)
    (scratch / f"{name}-2").symlink_to(scratch / "elsewhere")
    for job in ("1", "2"):
        with pytest.raises(SlurmError, match="others may write to it"):
            Scratch(scratch, "abcdef", job)
    assert list((scratch / "elsewhere").iterdir()) == []


def test_a_job_that_was_killed_finds_its_directory_again_as_the_sandbox_host_left_it(scratch):
    path = scratch / f"sbx-{os.getuid()}-abcdef-1"
    path.mkdir()
    path.chmod(0o711)
    held = Scratch(scratch, "abcdef", "1")
    held.remove()
    assert list(scratch.iterdir()) == []


def test_of_a_name_with_several_addresses_one_that_others_reach_is_taken(monkeypatch):
    monkeypatch.setattr(place.scheduler, "node_address", lambda node: "n1")
    entries = [(2, 1, 6, "", (address, 0)) for address in ("127.0.1.1", "10.0.0.7")]
    monkeypatch.setattr(place.socket, "getaddrinfo", lambda *_, **__: entries)
    assert place.address("n1", {}) == "10.0.0.7"
    del entries[1]
    assert place.address("n1", {}) == "127.0.1.1"
