"""What an engine job of Slurm tells a real gateway of its LLM servers."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rollout.client import Client
from services.launch.slurm.commands import slurm
from services.launch.slurm.engine import EngineJob
from services.launch.slurm.place import Place
from services.launch.slurm.rundir import DRAINING, UP, Head, RunDir, Submitted
from tests.helpers.fake_engine import fake_engine
from tests.helpers.keys import KEY
from tests.helpers.slurm_commands import Commands
from tests.helpers.stack import Stack


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """A gateway without workers."""
    with Stack(tmp_path_factory.mktemp("stack"), tmp_path_factory.mktemp("sandboxes")) as stack:
        yield stack


@pytest.fixture
def run(gateway, tmp_path):
    run = RunDir(tmp_path / "run")
    run.make()
    run.write_private(run.key_file, KEY)
    run.write_head(Head("1", "n1", "127.0.0.1", UP, gateway.url, "", None))
    return run


def job_with(run, node, urls):
    """Engine job 7 whose servers answer at these addresses."""
    job = EngineJob(run, Place(node, "7"))
    job._urls = {f"{node}-job7-{number}": url for number, url in enumerate(urls)}
    return job


def registered(gateway):
    with Client(gateway.url) as client:
        return {backend.id: backend.url for backend in client.backends() if not backend.draining}


def test_servers_are_on_the_list_while_their_job_serves_wherever_it_runs(gateway, run):
    with fake_engine() as engine, fake_engine() as spare:
        first = job_with(run, "g1", [engine.url])
        first._register()
        assert registered(gateway) == {"g1-job7-0": engine.url}
        (member,) = run.members()
        assert (member.name, member.backends) == ("g1-job7", {"g1-job7-0": engine.url})
        # Requeued on the same node it has another port, on another node another name.
        job_with(run, "g1", [spare.url])._register()
        assert registered(gateway) == {"g1-job7-0": spare.url}
        moved = job_with(run, "g2", [engine.url, spare.url])
        moved._register()
        assert registered(gateway) == {"g2-job7-0": engine.url, "g2-job7-1": spare.url}
        moved._drain(0.0)
        assert run.members()[-1].state == DRAINING
        moved._drain(30.0)
        assert registered(gateway) == {}  # draining
        moved._end()
        with Client(gateway.url) as client:
            assert client.backends() == []
        assert "g2-job7" not in {member.name for member in run.members()}


@pytest.mark.parametrize(("policy", "policies"), [("", None), ("default", None), ("judge", {"judge": None})])
def test_servers_are_registered_for_their_policy_and_with_their_key(run, monkeypatch, policy, policies):
    monkeypatch.setenv("ROLLOUT_SLURM_ENGINE_POLICY", policy)
    asked = []
    monkeypatch.setattr(Client, "add_backend", lambda _, url, **options: asked.append((url, options)))
    job = job_with(run, "g1", ["http://10.0.0.7:1"])
    job._key = "slurm-engines"
    job._register()
    told = {"id": "g1-job7-0", "key": "slurm-engines", "policies": policies}
    assert asked == [("http://10.0.0.7:1", told)]


def test_while_the_gateway_is_away_a_job_waits_for_it(gateway, run):
    head = run.head()
    run.write_head(Head("1", "n1", "127.0.0.1", UP, "http://127.0.0.1:9", "", None))
    with fake_engine() as server:
        job = job_with(run, "g1", [server.url])
        job._register()
        assert job.member.backends == {}
        run.write_head(head)
        job._register()
        assert registered(gateway) == {"g1-job7-0": server.url}
        job._end()
        assert registered(gateway) == {}


def test_status_ends_with_what_is_missing_and_the_command_that_mends_it(gateway, run, tmp_path, monkeypatch):
    run.write_submitted([Submitted("1", "head"), Submitted("2", "node", 1, ["run"])])
    commands = Commands(tmp_path, monkeypatch)

    def told(*jobs):
        commands.jobs("1|1|1|RUNNING|n1|None|1:00", *jobs)
        done = CliRunner().invoke(slurm, ["status", "--run-dir", str(run.path)])
        assert done.exit_code == 0, done.output
        return [line.strip() for line in done.output.splitlines()[-2:]]

    scale = f"rollout slurm scale --nodes N --run-dir {run.path}"
    assert told() == ["No node carries rollouts.", scale]
    node = "2_1|2|2|RUNNING|n2|None|1:00"
    assert told(node) == ["No LLM backend: rollouts that need a model wait.", "rollout backends add URL"]
    with fake_engine() as engine:
        job = job_with(run, "g1", [engine.url])
        job._register()
        assert told(node)[-1].startswith(f"backend g1-job7-0 {engine.url}")
        job._end()
