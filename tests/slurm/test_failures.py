"""What `up` and `status` say of jobs and programs that end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.launch.slurm import stack
from services.launch.slurm.commands import slurm
from services.launch.slurm.plan import UpOptions
from services.launch.slurm.rundir import NO_SANDBOX, UP, Head, Member, RunDir, Step, Submitted
from services.launch.slurm.site import Site
from services.launch.supervisor import part_log
from tests.helpers.slurm_commands import Commands
from tests.helpers.stack import ROOT
from tests.helpers.terminal import shown

HEAD_RUNS = "10|10|10|RUNNING|n9|None|1:00"


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A run directory whose jobs are those that the file `jobs` has; job 10 is the head, 11 the nodes."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "ROLLOUT_")):
            monkeypatch.delenv(name)
    run = RunDir(tmp_path / "run")
    run.make()
    (tmp_path / "later").mkdir()
    # What the jobs write comes with the first of them: `up` begins with an empty directory of members.
    copy = f"cp -r {tmp_path}/later/. {run.path}/"
    commands = Commands(
        tmp_path,
        monkeypatch,
        sbatch=f'{copy}\ncase "$*" in *head.sbatch*) echo 10 ;; *allocation*) echo 7 ;; *) echo 11 ;; esac',
        scontrol="echo JobId=12 JobState=FAILED ExitCode=3:0",
    )
    monkeypatch.setattr(stack, "POLL_S", 0.01)
    run.commands = commands
    return run


def slurm_knows(service, *lines):
    service.commands.jobs(*lines)


def say(service, job, text):
    path = service.logs / f"{job}.log"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def run(service, *arguments):
    done = CliRunner().invoke(slurm, [*map(str, arguments), "--run-dir", str(service.path)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def submitted(service):
    service.write_submitted([Submitted("10", "head"), Submitted("11", "node", 2, ["init", "run", "eval"])])


def test_up_tells_why_a_node_job_ended_and_gives_up_when_none_is_left(service):
    slurm_knows(
        service,
        HEAD_RUNS,
        "11_1|12|11|FAILED|n1|NonZeroExitCode|0:00",
        "11_2|11|11|FAILED|n2|NonZeroExitCode|0:00",
    )
    log = say(service, "node-12", "noise\nImportError: no module of that name\n")
    done = run(service, "up", "--nodes", 2)
    assert done.exit_code == 1
    assert f"node job 11_1 failed on n1 (exit code 3). The end of {log}:\nnoise\nImportError" in done.output
    assert "node job 11_2 failed on n2 (exit code 3). It left no log" in done.output
    assert done.output.count("ImportError") == 1
    asked = ["--oneliner show job 11_1", "--oneliner show job 11_2"]
    assert service.commands.called("scontrol") == asked
    assert "all node jobs have ended, as said above; `rollout slurm down` ends the others" in done.output


def test_up_goes_on_with_the_nodes_that_are_left(service):
    slurm_knows(
        service,
        HEAD_RUNS,
        "11_1|12|11|FAILED|n1|NonZeroExitCode|0:00",
        "11_2|11|11|RUNNING|n2|None|1:00",
    )
    say(service, "node-12", "disk full\n")
    done = run(service, "up", "--nodes", 2, "--timeout", 0.3)
    assert done.exit_code == 1
    assert done.output.count("node job 11_1 failed on n1") == 1 and "disk full" in done.output
    assert "not up after" in done.output and "have ended" not in done.output


def test_without_a_head_up_gives_up_with_the_end_of_its_log(service):
    slurm_knows(service, "10|10|10|CANCELLED|n9|None|0:00", "11_[1-2]|11|11|PENDING||Resources|1:00")
    log = say(service, "head-10", "no space left\n")
    done = run(service, "up", "--nodes", 2)
    assert done.exit_code == 1
    assert "the head's job has ended; `rollout slurm down` ends the others" in done.output
    assert f"The end of {log}:\nno space left" in done.output


@pytest.mark.parametrize(
    ("reasons", "shown"), [(["a", "b", "c", "d", "e"], 3), (["a", "a", "b", "a", "b"], 2)]
)
def test_of_many_failures_three_that_differ_are_told_at_length(service, reasons, shown):
    jobs = [f"11_{number}|{11 + number}|11|NODE_FAIL|n{number}|None|0:00" for number in range(1, 6)]
    slurm_knows(service, HEAD_RUNS, *jobs)
    for number, reason in enumerate(reasons, 1):
        say(service, f"node-{11 + number}", f"noise {number}\n{reason}\n")
    done = run(service, "up", "--nodes", 5)
    assert done.output.count("The end of") == shown
    assert f"and {5 - shown} more: node job 11_" in done.output
    assert "node job 11_4 lost its node on n4; node job 11_5 lost its node on n5" in done.output


def test_up_tells_of_programs_that_keep_ending_and_of_nodes_without_sandboxes(service):
    slurm_knows(service, HEAD_RUNS, "11_1|12|11|RUNNING|n1|None|1:00")
    member = Member("n1-job12", "node", "12", "n1", UP, ["init", "run", "eval"])
    member.failing = {"run fleet": "exit code 1, 2 times in a row"}
    member.sandbox = f"{NO_SANDBOX}: no apptainer"
    later = RunDir(service.path.parent / "later")
    later.make()
    later.write_member(member)
    log = say(service, "n1-job12/run-fleet", "ModuleNotFoundError: handlers\n")
    assert log == part_log(service.logs / "n1-job12", "run fleet")
    done = run(service, "up", "--nodes", 1, "--timeout", 0.3)
    assert done.exit_code == 1 and "not up after" in done.output
    line = f"run fleet of node job 12 keeps ending (exit code 1, 2 times in a row) on n1. The end of {log}"
    assert done.output.count(line) == 1 and "ModuleNotFoundError: handlers" in done.output
    assert done.output.count("n1: NO SANDBOX WORKS: no apptainer") == 1


def test_status_tells_what_failed_while_slurm_remembers_it_and_the_last_words_afterwards(service):
    submitted(service)
    log = say(service, "head-10", "address in use\n")
    slurm_knows(service, "10|10|10|FAILED|n9|NonZeroExitCode|0:00")
    done = run(service, "status")
    assert done.exit_code == 1
    assert f"head job 10 failed on n9 (exit code 3). The end of {log}:\naddress in use" in done.output
    (failure,) = json.loads(run(service, "status", "--json").output)["failures"]
    assert (failure["what"], failure["node"], failure["log"]) == ("head job 10", "n9", str(log))
    slurm_knows(service)
    done = run(service, "status")
    assert f"what was submitted has ended. The end of {log}:\naddress in use" in done.output


def test_jobs_that_ended_in_order_or_were_cancelled_are_no_failures(service):
    submitted(service)
    slurm_knows(
        service,
        HEAD_RUNS,
        "11_1|12|11|COMPLETED|n1|None|0:00",
        "11_2|11|11|CANCELLED||None|0:00",
        "99|99|99|FAILED|n3|None|0:00",
    )
    done = run(service, "status", "--json")
    assert done.exit_code == 0
    status = json.loads(done.output)
    assert status["failures"] == [] and status["jobs"] == [] and status["gone"] == ["node"]


def test_a_job_that_carries_everything_notes_how_its_steps_end(service):
    """Its script, with an srun that fails for one node."""
    service.commands.write("srun", 'case "$*" in *node-7-n2.log*) exit 3;; esac')
    service.commands.write("scontrol", "echo n1; echo n2")
    earlier = service.path / "control" / "node-7-n3.step"
    earlier.write_text("1\n")
    scripts = ROOT / "deploy" / "slurm"
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    command = ["bash", str(scripts / "allocation.sbatch"), str(service.path), str(scripts)]
    subprocess.run(command, env=env, check=True, timeout=60)
    assert service.steps("7") == [
        Step("head-7", "head", "", 0, service.logs / "head-7.log"),
        Step("node-7-n1", "node", "n1", 0, service.logs / "node-7-n1.log"),
        Step("node-7-n2", "node", "n2", 3, service.logs / "node-7-n2.log"),
    ]
    assert service.steps("77") == []
    service.forget_life()
    assert service.steps("7") == []


@pytest.mark.parametrize(
    ("ended", "timeout", "verdict"),
    [
        (["head-7"], 200, "the head's job has ended, as said above"),
        (["node-7-n1", "node-7-n2"], 200, "all node jobs have ended, as said above"),
        (["node-7-n1"], 0.5, "not up after"),
    ],
)
def test_up_gives_up_when_the_head_s_step_or_those_of_all_nodes_have_ended(service, ended, timeout, verdict):
    slurm_knows(service, "7|7|7|RUNNING|n[1-2]|None|1:00")
    control = service.path.parent / "later" / "control"
    control.mkdir()
    for step in ("head-7", "node-7-n1", "node-7-n2"):
        (control / f"{step}.step").write_text("2\n" if step in ended else "")
        say(service, step, f"{step} says why\n")
    done = run(service, "up", "--one-job", "--nodes", 2, "--timeout", timeout)
    assert done.exit_code == 1 and verdict in done.output
    for step in ended:
        assert f"{step} failed (exit code 2)" in done.output and f"{step} says why" in done.output


def test_head_that_is_up_without_a_gateway_is_shown_whatever_is_in_its_error(service):
    submitted(service)
    slurm_knows(service, HEAD_RUNS)
    service.write_head(Head("10", "n9", "127.0.0.1", UP, "http://127.0.0.1:9", "", 1))
    done = run(service, "status")
    assert done.exit_code == 0 and "the gateway does not answer" in done.output


NODES_RUN = ("11_1|12|11|RUNNING|n1|None|1:00", "11_2|11|11|RUNNING|n2|None|1:00")


def headless(service, *heads):
    """A service that was up, and whose head is gone."""
    submitted(service)
    service.write_options(UpOptions(nodes=2, given={"account": "a"}).to_json(Site()))
    service.write_head(Head("10", "n9", "127.0.0.1", UP, "http://127.0.0.1:9", "", 1))
    for node, job in (("n1", "12"), ("n2", "11")):
        service.write_member(Member(f"{node}-job{job}", "node", job, node, UP, ["init", "run", "eval"]))
    slurm_knows(service, *heads, *NODES_RUN)


@pytest.mark.parametrize(
    ("heads", "how"),
    [
        (["10|10|10|NODE_FAIL|n9|None|0:00"], "job 10 lost its node on n9"),
        (["10|10|10|CANCELLED|n9|None|0:00"], "job 10 was cancelled on n9"),
        (["10|10|10|COMPLETING|n9|None|0:00"], "job 10 still ends on n9"),
        ([], "Slurm has forgotten its job"),
    ],
)
def test_a_service_without_its_head_is_told_with_the_command_that_brings_it_back(service, heads, how):
    headless(service, *heads)
    command = [Path(sys.executable).with_name("rollout"), "slurm", "status", "--run-dir", str(service.path)]
    if heads:
        piped = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        status, output = piped.returncode, piped.stdout
    else:
        output, status = shown(command)
    assert status == 1
    told = output[output.index("The head is gone") :]
    since = r"last heard of at [\d:]+, 0:00:0\d ago\."
    assert re.match(rf"The head is gone: {re.escape(how)}, {since}\nUp without it: n1, n2\. ", told), output
    do = f"rollout slurm up --run-dir {service.path}"
    assert output.splitlines()[-1].strip() == do
    assert "-job1" not in output
    (advice,) = [json.loads(run(service, "status", "--json").output)["advice"]]
    assert advice.splitlines()[-1].strip() == do
    scaled = run(service, "scale", "--nodes", 3)
    assert scaled.exit_code == 1 and how in scaled.output and scaled.output.rstrip().endswith(do)
    assert service.commands.called("sbatch") == service.commands.called("scancel") == []


def test_up_of_a_service_without_its_head_submits_the_head_alone_as_it_was_asked_before(service):
    headless(service, "10|10|10|CANCELLED|n9|None|0:00")
    service.ask_to_drain("head", 0.0)
    before = service.options()
    options = ("--nodes", 7, "--data-dir", "/data", "--slots-run", 9, "--slots-eval", 16, "--time", "2:00:00")
    *_, planned = run(service, "up", *options, "--dry-run").output.splitlines()
    assert service.commands.called("sbatch") == [] and service.asked_to_drain("head") == 0.0
    done = run(service, "up", *options, "--no-wait")
    assert done.exit_code == 0, done.output
    (line,) = service.commands.called("sbatch")
    assert planned == f"sbatch {line}"
    assert "head.sbatch" in line and {"--account=a", "--time=2:00:00"} <= set(line.split())
    assert "the head alone: its nodes join it as they are" in done.output
    assert "not changed: nodes, slots, data dir; `rollout slurm down`, then" in done.output
    assert service.options() == before and service.asked_to_drain("head") is None
    assert len(service.members()) == 2
    slurm_knows(service, "10|10|10|PENDING||Resources|1:00", *NODES_RUN)
    again = run(service, "up")
    assert again.exit_code == 1 and "a service runs already" in again.output


@pytest.mark.parametrize(
    ("ends", "nodes", "waits_for", "submitted"),
    [
        ("10|10|10|COMPLETING|n9|None|0:00", NODES_RUN, "10", ["head"]),
        ("10|10|10|COMPLETING|n9|None|0:00", (), "10", ["head", "node"]),
        ("11_1|12|11|COMPLETING|n1|None|0:00", (), "11_1", ["head", "node"]),
    ],
)
def test_up_waits_for_a_head_that_still_ends_and_begins_anew_where_all_does(
    service, ends, nodes, waits_for, submitted
):
    headless(service)
    slurm_knows(service, *nodes, ends)
    if not nodes:
        assert "--array=1-16" in run(service, "up", "--nodes", 16, "--dry-run").output
    slurm_knows(service, *nodes)
    noted = service.path.parent / "called"
    body = f"cat {service.path.parent}/jobs; [ $(grep -c ^squeue {noted}) -gt 3 ] || echo '{ends}'"
    service.commands.write("squeue", body)
    noted.write_text("")
    done = run(service, "up", "--nodes", 16, "--no-wait")
    assert done.exit_code == 0, done.output
    assert f"waiting for what still ends: {waits_for}\n" in done.output
    assert [line.split()[0] for line in noted.read_text().splitlines()[:4]] == ["squeue"] * 4
    lines = service.commands.called("sbatch")
    assert [re.search(r"(\w+)\.sbatch", line)[1] for line in lines] == submitted
    assert nodes or "--array=1-16" in lines[1]


def test_up_gives_up_on_a_head_that_does_not_end(service, monkeypatch):
    monkeypatch.setattr(stack, "END_S", 0.1)
    headless(service, "10|10|10|COMPLETING|n9|None|0:00")
    done = run(service, "up")
    assert done.exit_code == 1 and "not ended yet: 10; see `scontrol show job`" in done.output
    assert service.commands.called("sbatch") == []


def test_what_became_of_the_rollouts_of_drained_nodes_is_told_until_the_service_has_gone_down(service):
    submitted(service)
    slurm_knows(service, HEAD_RUNS, *NODES_RUN)
    text = "n1 (job 12) drained at 12:00:00: 3 rollouts finished, 1 handed back"
    service.write_private(service.path / "control" / "n1-job12.drained", text)
    assert text in run(service, "status").output
    assert json.loads(run(service, "status", "--json").output)["drained"] == [text]
    service.forget_life()
    assert service.drained() == {}
