"""Which jobs the autoscaler submits and drains."""

from __future__ import annotations

import pytest

from rollout.schema.fleet import WorkerLoad
from services.autoscale.engines import LlmLoad, SlurmEngines
from services.autoscale.policy import STAGES, NodeState
from services.autoscale.scaler import SlurmNodes
from services.launch import SlurmError
from services.launch.slurm.plan import Engines, UpOptions
from services.launch.slurm.rundir import UP, Member, Submitted
from services.launch.slurm.site import Site
from services.launch.slurm.stack import SlurmStack
from tests.helpers.heap import backend
from tests.helpers.slurm_commands import Commands

SLOTS = {"init": 4, "run": 8, "eval": 4}
RUNNING = "9|9|9|RUNNING|n9|None|1:00", "10_1|12|10|RUNNING|n1|None|1:00", "10_2|13|10|RUNNING|n2|None|1:00"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    return Commands(tmp_path, monkeypatch, sbatch="echo 20")


@pytest.fixture
def stack(commands):
    """Of three nodes: n1 and n2 serve, the third waits in the queue; beside it a job of RUN alone."""
    stack = SlurmStack(commands.directory / "run")
    stack.run.make()
    stack.run.write_options(UpOptions(nodes=3, slots=SLOTS).to_json(Site()))
    nodes = [Submitted("10", "node", 3, list(STAGES)), Submitted("11", "node", 1, ["run"])]
    stack.run.write_submitted([Submitted("9", "head"), *nodes])
    commands.jobs(*RUNNING, "10_3|10|10|PENDING||Resources|1:00", "11|11|11|RUNNING|n3|None|1:00")
    for node, job, stages in (("n1", "12", STAGES), ("n2", "13", STAGES), ("n3", "11", ("run",))):
        stack.run.write_member(Member(f"{node}-job{job}", "node", job, node, UP, list(stages), SLOTS))
    return stack


def workers(**held):
    """Of n1 and n2, with so many rollouts in hand."""
    return [
        WorkerLoad(
            name=f"{stage}@{node}",
            node=node,
            stages=[stage],
            slots=SLOTS[stage],
            slots_limit=SLOTS[stage],
            busy=held.get(node, 0),
        )
        for node in ("n1-job12", "n2-job13")
        for stage in STAGES
    ]


def test_nodes_that_serve_are_told_from_those_on_their_way_and_from_other_kinds(stack):
    pool = SlurmNodes(stack)
    assert pool.look(STAGES, workers()) == NodeState(up=2, coming=1, slots=SLOTS)
    # n2 runs already, but its worker of EVAL has not announced itself.
    assert pool.look(STAGES, workers()[:-1]) == NodeState(up=1, coming=2, slots=SLOTS)
    assert pool.look(("run",), workers()) == NodeState(up=0, coming=1, slots={"run": 8})


def test_more_nodes_are_submitted_as_up_was_asked(stack, commands):
    SlurmNodes(stack).set(STAGES, 5, workers())
    (line,) = commands.called("sbatch")
    assert "--array=1-2" in line.split()
    assert line.endswith("init,run,eval")
    assert commands.called("scancel") == []


def test_jobs_that_wait_are_dropped_first_then_the_node_with_the_least_in_hand_is_drained(stack, commands):
    SlurmNodes(stack, grace_s=77).set(STAGES, 1, workers(**{"n1-job12": 1, "n2-job13": 5}))
    assert any("10_3" in line.split() for line in commands.called("scancel"))
    assert stack.run.asked_to_drain("n1-job12") == 77
    assert stack.run.asked_to_drain("n2-job13") is None
    # It drains now, so it does not count any more.
    commands.jobs(*RUNNING)
    assert SlurmNodes(stack).look(STAGES, workers()) == NodeState(up=1, coming=0, slots=SLOTS)


def test_what_slurm_refuses_is_passed_on(stack, commands):
    commands.write("sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1")
    with pytest.raises(SlurmError, match="no such partition"):
        SlurmNodes(stack).set(STAGES, 9, workers())


ENGINES = "9|9|9|RUNNING|n9|None|1:00", "20|20|20|RUNNING|g1|None|1:00", "21|21|21|RUNNING|g2|None|1:00"
BESIDE = "22|22|22|PENDING||Resources|1:00", "23|23|23|RUNNING|g3|None|1:00"


@pytest.fixture
def engines(commands):
    """Two engines of `default` serve, a third waits in the queue; beside them one of `judge`."""
    stack = SlurmStack(commands.directory / "run")
    stack.run.make()
    asked = UpOptions(nodes=0, engines=Engines(3, command="serve {policy} {port}"))
    stack.run.write_options(asked.to_json(Site()))
    own = [Submitted(job, "engine") for job in ("20", "21", "22")]
    stack.run.write_submitted([Submitted("9", "head"), *own, Submitted("23", "engine", 1, ["judge"])])
    commands.jobs(*ENGINES, *BESIDE)
    for node, job in (("g1", "20"), ("g2", "21"), ("g3", "23")):
        name = f"{node}-job{job}"
        stack.run.write_member(
            Member(name, "engine", job, node, UP, backends={f"{name}-0": f"http://{node}"})
        )
    return stack


def llm(*without, **loads):
    """Servers of those engines, with so many tokens reserved, and one that somebody else runs."""
    servers = {"g1-job20-0": {}, "g2-job21-0": {}, "g3-job23-0": {"policies": {"judge": "m"}}, "x": {}}
    return LlmLoad(
        [
            backend(name, load=loads.get(name[:2], 0.0), **more)
            for name, more in servers.items()
            if name[:2] not in without
        ],
        {},
    )


def test_engines_of_a_policy_are_told_from_anothers_and_from_servers_that_are_not_ours(engines):
    state = SlurmEngines(engines, 5).look("default", llm())
    assert (state.nodes.up, state.nodes.coming) == (2, 1)
    assert [server.id for server in state.own] == ["g1-job20-0", "g2-job21-0"]
    assert [server.id for server in state.others] == ["x"]
    state = SlurmEngines(engines, 5).look("judge", llm())
    assert (state.nodes.up, state.nodes.coming, len(state.own), state.others) == (1, 0, 1, [])
    # One whose server is not healthy, or drains, is not there yet, or not any more.
    assert SlurmEngines(engines, 5).look("default", llm("g2")).nodes.up == 1


def test_engines_are_of_the_policy_that_up_was_asked_for(engines, commands):
    asked = UpOptions(nodes=0, engines=Engines(3, command="serve {port}", policy="user"))
    engines.run.write_options(asked.to_json(Site()))
    assert len(engines.active("engine", ["user"])) == 3
    assert engines.active("engine", ["default"]) == []
    SlurmEngines(engines, 5).set("user", 4, {})
    SlurmEngines(engines, 5).set("default", 1, {})
    own, default = commands.called("sbatch")
    assert own.endswith(str(engines.run.path)) and default.endswith(f"{engines.run.path} default")


def test_engines_of_which_up_was_told_nothing_are_refused(engines):
    engines.run.write_options(UpOptions(nodes=1).to_json(Site()))
    for ask in (lambda: SlurmEngines(engines, 5).look("default", llm()), engines.engine_policy):
        with pytest.raises(SlurmError, match="told of no engines: give --engine-nodes"):
            ask()


def test_more_engines_are_submitted_for_their_policy(engines, commands):
    SlurmEngines(engines, 5).set("default", 4, {})
    SlurmEngines(engines, 5).set("judge", 3, {})
    own, judges = commands.called("sbatch")
    assert "--array=1-1" in own.split() and own.endswith(f"engine.sbatch {engines.run.path}")
    assert "--array=1-2" in judges.split() and judges.endswith(f"{engines.run.path} judge")
    assert [job.stages for job in engines.run.submitted()][-2:] == [[], ["judge"]]


def test_of_engines_those_go_first_that_serve_nobody_yet_then_the_one_with_the_least_reserved(
    engines, commands
):
    # g2 runs, but its server is not healthy: the one that waits and it go before one that serves.
    SlurmEngines(engines, 5).set("default", 1, SlurmEngines(engines, 5).look("default", llm("g2")).held)
    assert [engines.run.asked_to_drain(f"{job}") for job in ("g1-job20", "g2-job21", "g3-job23")] == [
        None,
        5,
        None,
    ]
    assert any("22" in line.split() for line in commands.called("scancel"))
    assert SlurmEngines(engines, 5).look("default", llm("g2")).nodes.up == 1


def test_the_least_loaded_engine_is_drained(engines, commands):
    held = SlurmEngines(engines, 5).look("default", llm(g1=100.0, g2=900.0)).held
    assert held == {"g1-job20": 101, "g2-job21": 901}
    SlurmEngines(engines, 5).set("default", 1, held)
    assert engines.run.asked_to_drain("g1-job20") == 5
    assert engines.run.asked_to_drain("g2-job21") is None
