"""What an engine job of Slurm tells a real gateway of its LLM servers."""

from __future__ import annotations

import json

import pytest

from rollout.client import Client
from services.launch.slurm.engine import EngineJob
from services.launch.slurm.place import Place
from services.launch.slurm.rundir import DRAINING, UP, Head, RunDir
from tests.helpers.fake_engine import fake_engine
from tests.helpers.keys import KEY
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
    job._urls = {f"{node}-7-{number}": url for number, url in enumerate(urls)}
    return job


def registered(gateway):
    with Client(gateway.url) as client:
        return {backend.id: backend.url for backend in client.backends() if not backend.draining}


def test_servers_are_on_the_list_while_their_job_serves_wherever_it_runs(gateway, run):
    with fake_engine() as engine, fake_engine() as spare:
        first = job_with(run, "g1", [engine.url])
        first._register()
        assert registered(gateway) == {"g1-7-0": engine.url}
        assert json.loads((run.path / "members/g1-7.json").read_text())["backends"] == {"g1-7-0": engine.url}
        # Requeued on the same node it has another port, on another node another name.
        job_with(run, "g1", [spare.url])._register()
        assert registered(gateway) == {"g1-7-0": spare.url}
        moved = job_with(run, "g2", [engine.url, spare.url])
        moved._register()
        assert registered(gateway) == {"g2-7-0": engine.url, "g2-7-1": spare.url}
        moved._drain(0.0)
        assert run.members()[-1].state == DRAINING
        moved._drain(30.0)
        assert registered(gateway) == {}  # draining
        moved._end()
        with Client(gateway.url) as client:
            assert client.backends() == []
        assert "g2-7" not in {member.name for member in run.members()}


def test_while_the_gateway_is_away_a_job_waits_for_it(gateway, run):
    head = run.head()
    run.write_head(Head("1", "n1", "127.0.0.1", UP, "http://127.0.0.1:9", "", None))
    with fake_engine() as server:
        job = job_with(run, "g1", [server.url])
        job._register()
        assert job.member.backends == {}
        run.write_head(head)
        job._register()
        assert registered(gateway) == {"g1-7-0": server.url}
        job._end()
        assert registered(gateway) == {}
