"""What `rollout slurm` submits, checks and refuses; no cluster is needed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sandbox.paths import SOCKET_PATH_MAX
from services.launch import SlurmError
from services.launch.slurm import engine, place, plan, scheduler, site
from services.launch.slurm.commands import slurm
from services.launch.slurm.place import Place, Scratch
from services.launch.slurm.plan import Engines, UpOptions
from services.launch.slurm.rundir import ENGINE_KEY, Member, RunDir, Submitted
from tests.helpers.stack import ROOT

SITE = """
scratch = "/scratch/$USER"
images = "/shared/images"
modules = ["apptainer/1.3"]
[environment]
HF_HOME = "/shared/hf"
[sbatch]
partition = "cpu"
account = "project17"
[sbatch.node]
exclusive = false
mem = "120G"
[sbatch.engine]
partition = "gpu"
gres = "gpu:4"
"""


@pytest.fixture
def site_file(tmp_path):
    path = tmp_path / "slurm.toml"
    path.write_text(SITE)
    return path


@pytest.fixture
def directory(tmp_path):
    directory = RunDir(tmp_path / "run")
    directory.make()
    return directory


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "ROLLOUT_SLURM_")):
            monkeypatch.delenv(name)


def run(*arguments, env=None):
    return CliRunner().invoke(slurm, list(map(str, arguments)), env=env)


def sbatch_lines(output):
    return [line for line in output.splitlines() if line.startswith("sbatch ")]


def test_a_dry_run_prints_what_would_be_submitted_and_makes_nothing(tmp_path, site_file):
    run_dir = tmp_path / "run"
    done = run(
        *("up", "--dry-run", "--nodes", 8, "--site", site_file, "--run-dir", run_dir, "--time", "2:00:00"),
        *("--engine-nodes", 2, "--engine-model", "m", "--slots-run", 128),
        env={"ROLLOUT_WEBHOOK_SECRET": "whsec_secret", "ROLLOUT_LEASE_S": "20", "ROLLOUT_API_KEY": "rlt_x"},
    )
    assert done.exit_code == 0, done.output
    head, node, servers = sbatch_lines(done.output)
    for line in (head, node, servers):
        assert "--account=project17" in line and "--time=2:00:00" in line and str(run_dir) in line
    assert "--partition=cpu" in head and "--dependency=singleton" in head and "--array" not in head
    assert "--array=1-8" in node and "--mem=120G" in node and "--exclusive" not in node
    assert "--array=1-2" in servers and "--partition=gpu" in servers and "--gres=gpu:4" in servers
    assert "--partition=cpu" not in servers and "--exclusive" in servers
    assert "export ROLLOUT_SLURM_SLOTS_RUN=128" in done.output
    assert "export ROLLOUT_LEASE_S=20" in done.output
    assert "secret" not in done.output.replace("SECRET=***", "") and "rlt_x" not in done.output
    assert not run_dir.exists()


def test_one_job_carries_everything_and_with_engines_is_heterogeneous(tmp_path, site_file):
    options = (
        "up",
        "--dry-run",
        "--one-job",
        "--nodes",
        4,
        "--site",
        site_file,
        "--run-dir",
        tmp_path / "run",
    )
    (line,) = sbatch_lines(run(*options).output)
    assert "--nodes=4" in line and "allocation.sbatch" in line and " : " not in line
    (line,) = sbatch_lines(run(*options, "--engine-nodes", 1, "--engine-model", "m").output)
    carriers, servers = line.split(" : ")
    assert "--nodes=4" in carriers and "--partition=cpu" in carriers
    assert "--nodes=1" in servers and "--partition=gpu" in servers


def test_inside_an_allocation_its_nodes_are_used(tmp_path):
    env = {"SLURM_JOB_ID": "17"}
    done = run("up", "--dry-run", "--run-dir", tmp_path / "run", env=env)
    assert done.exit_code == 0 and not sbatch_lines(done.output)
    assert done.output.splitlines()[-1].startswith("bash ")
    assert sbatch_lines(run("up", "--dry-run", "--nodes", 2, "--run-dir", tmp_path / "run", env=env).output)


def test_the_environment_of_jobs_is_shell_that_says_what_was_meant(tmp_path, site_file):
    options = UpOptions(2, engines=Engines(1, "org/model", "serve '{model}' --port {port}", policy="judge"))
    environ = {
        "ROLLOUT_HANDLERS": "mine:It's",
        "ROLLOUT_URL": "http://elsewhere",
        "ROLLOUT_NODE": "login",
        "ROLLOUT_ENGINE_KEYS": "/my/keys:/shared/keys",
        "ROLLOUT_ENGINE_TOKEN_FILE": "/my/engine",
        "AWS_SECRET": "no",
        "PYTHONPATH": "/my/handlers",
    }
    text = plan.environment(RunDir(tmp_path / "run"), site.load(site_file), options, environ)
    script = tmp_path / "environment"
    script.write_text(text)
    shell = f'module() {{ echo "module $*"; }}; . {script}; env'
    lines = subprocess.run(
        ["bash", "-c", shell],
        env={"USER": "ann", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert lines[0] == "module load apptainer/1.3"
    values = dict(line.split("=", 1) for line in lines[1:] if "=" in line)
    assert values["ROLLOUT_HANDLERS"] == "mine:It's"
    assert values["ROLLOUT_SLURM_SCRATCH"] == "/scratch/ann"
    assert values["ROLLOUT_IMAGES"] == "/shared/images" and values["HF_HOME"] == "/shared/hf"
    assert values["ROLLOUT_SLURM_ENGINE_COMMAND"] == "serve '{model}' --port {port}"
    assert values["ROLLOUT_SLURM_ENGINE_POLICY"] == "judge"
    # The user's own stay beside those of the service's engines.
    assert values["ROLLOUT_ENGINE_KEYS"] == f"{tmp_path}/run/engine-keys:/my/keys:/shared/keys"
    assert values["PYTHONPATH"] == f"{ROOT}:/my/handlers"
    assert not {"ROLLOUT_ENGINE_TOKEN_FILE", "ROLLOUT_URL", "ROLLOUT_NODE", "AWS_SECRET"} & values.keys()


@pytest.mark.parametrize(
    ("before", "output", "error"),
    [
        ("", [], "module load nonsuch/1 failed"),
        ("module() { echo loaded$NOT_SET; }; ", ["loaded", "strict"], ""),
    ],
)
def test_a_module_may_use_what_is_not_set_and_one_that_is_not_there_ends_the_job_with_a_word_why(
    tmp_path, before, output, error
):
    options = RunDir(tmp_path / "run"), site.parse({"modules": ["nonsuch/1"]}), UpOptions(1), {}
    (tmp_path / "environment").write_text(plan.environment(*options))
    shell = f"{before}. {tmp_path}/environment; case $- in *u*) echo strict ;; esac"
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-euc", shell], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == output
    assert (done.returncode, done.stderr.splitlines()[-1:]) == ((1, [error]) if error else (0, []))


def test_slots_stay_those_that_up_was_given_whoever_submits_more(monkeypatch):
    monkeypatch.setenv("ROLLOUT_WORKER_SLOTS", "128")
    saved = UpOptions(2, slots={"eval": 4}).to_json(site.Site())
    monkeypatch.delenv("ROLLOUT_WORKER_SLOTS")
    again = UpOptions.from_json(saved)[0]
    assert [again.slots_of(stage) for stage in plan.STAGES] == [16, 128, 4]


def test_a_run_directory_that_slurm_would_misread_is_refused(tmp_path):
    with pytest.raises(SlurmError, match="otherwise; choose one with --run-dir"):
        RunDir(tmp_path / "50%j").make()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = 3", "unknown key 'nodes'"),
        ("scratch = 'tmp'", "scratch = 'tmp' is no absolute path"),
        ("modules = 'apptainer'", "is no list of module names"),
        ("modules = ['x; rm -rf ~']", "is no list of module names"),
        ("[environment]\n'A B' = 'x'", "is no variable"),
        ("[sbatch]\noutput = 'x'", "sbatch.output cannot be set here: logs go into the run directory"),
        ("[sbatch.gpu]\nmem = '1G'", "is no long option of sbatch"),
        ("[sbatch.node]\nnodes = 3", "give --nodes"),
        ("[sbatch", "slurm.toml"),
    ],
)
def test_a_site_file_that_cannot_be_is_refused_by_its_key(tmp_path, text, message):
    path = tmp_path / "slurm.toml"
    path.write_text(text)
    done = run("up", "--dry-run", "--site", path, "--run-dir", tmp_path / "run")
    assert done.exit_code == 1
    assert str(path) in done.output and message in done.output


@pytest.mark.parametrize(
    ("arguments", "env", "status", "words"),
    [
        (("up", "--dry-run", "--engine-nodes", 1), {}, 1, "--engine-model or --engine-command"),
        (
            ("up", "--dry-run", "--engine-nodes", 1, "--engine-model", "m", "--engine-policy", "../x"),
            {},
            1,
            "no policy's name",
        ),
        (("up", "--attach", "--dry-run", "--one-job"), {}, 2, "leave out"),
        (("up", "--attach", "--nodes", 2), {"SLURM_JOB_ID": "17"}, 2, "leave out --nodes"),
        (("up", "--dry-run", "--one-job", "--nodes", 0), {}, 1, "needs --nodes of at least 1"),
        (
            ("up", "--engine-nodes", 1, "--engine-model", "m"),
            {"SLURM_JOB_ID": "17"},
            1,
            "second component of a heterogeneous allocation",
        ),
        (("scale",), {}, 2, "give --nodes, --engines or --stage"),
        (("scale", "--stage", "score=2"), {}, 2, "write run=4"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(tmp_path, arguments, env, status, words):
    done = run(*arguments, "--run-dir", tmp_path / "run", env=env)
    assert done.exit_code == status and words in done.output


def test_without_slurm_s_commands_the_message_says_where_to_go(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run("up", "--no-wait", "--run-dir", tmp_path / "run")
    assert done.exit_code == 1 and "sbatch is not on PATH" in done.output
    assert RunDir(tmp_path / "run").submitted() == []


def test_a_refusal_of_slurm_names_the_command_and_the_remedy():
    text = scheduler.explain(["sbatch", "-p", "x"], "sbatch: error: invalid partition specified: x")
    assert "`sbatch -p x` failed" in text and "sinfo -s" in text


def test_slurm_s_commands_get_no_secrets_of_the_caller():
    environ = {
        "PATH": "/bin",
        "ROLLOUT_API_KEY": "k",
        "SLURM_CONF": "c",
        "SLURM_JOB_ID": "3",
        "SBATCH_ACCOUNT": "a",
    }
    assert scheduler.environment(environ) == {"PATH": "/bin", "SLURM_CONF": "c", "SBATCH_ACCOUNT": "a"}


@pytest.mark.parametrize("name", ["head", "node", "engine", "allocation"])
def test_the_scripts_are_sound_shell_and_say_how_they_are_used(name):
    path = ROOT / "deploy" / "slurm" / f"{name}.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    done = subprocess.run(
        ["bash", str(path)], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode != 0 and f"usage: sbatch {name}.sbatch RUN" in done.stderr


def test_the_run_directory_and_what_is_secret_in_it_are_the_owner_s_alone(tmp_path):
    old = os.umask(0)
    try:
        directory = RunDir(tmp_path / "run")
        directory.make()
        directory.redis.mkdir()
        secret, key = directory.redis_password(), directory.api_key()
        directory.write_private(directory.environment, "export A=b\n")
    finally:
        os.umask(old)
    assert len(secret) == 64 and directory.redis_password() == secret and directory.api_key() == key
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    for path in (directory.redis / "password", directory.key_file, directory.environment):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_engines_of_a_service_that_begins_get_a_token_of_their_own(directory):
    def token():
        directory.renew_engine_key()
        path = directory.engine_keys / ENGINE_KEY
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.engine_keys.stat().st_mode) == 0o700
        return path.read_text().strip()

    first, second = token(), token()
    assert first != second and len(first) == len(second) == 43


def test_a_run_directory_keeps_what_members_and_commands_say(directory, tmp_path):
    member = Member("n1-job3", "node", "3", "n1", "up", ["run"], {"run": 4})
    directory.write_member(member)
    directory.write_submitted([Submitted("3", "node", 2, ["run"])])
    directory.ask_to_drain("n1-job3", 5.0)
    same = RunDir(tmp_path / "run")
    assert same.members() == [member] and same.asked_to_drain("n1-job3") == 5.0
    assert same.submitted() == [Submitted("3", "node", 2, ["run"])]
    same.forget_member("n1-job3")
    assert same.members() == [] and same.asked_to_drain("n1-job3") is None
    (directory.path / "jobs.json").write_text("{")
    with pytest.raises(SlurmError, match=r"jobs\.json cannot be read"):
        same.submitted()


def test_a_job_that_was_requeued_forgets_what_it_said_on_another_node(directory):
    for name, job, node in (("n1-job3", "3", "n1"), ("n2-job4", "4", "n2")):
        directory.write_member(Member(name, "node", job, node, "up"))
        directory.ask_to_drain(name, 1.0)
    directory.forget_earlier_life("3")
    assert [member.name for member in directory.members()] == ["n2-job4"]
    assert directory.asked_to_drain("n1-job3") == 1.0


def test_a_place_is_named_by_node_and_job():
    assert Place.here({"SLURMD_NODENAME": "n1.site", "SLURM_JOB_ID": "7"}).name == "n1-site-job7"
    het = {"SLURMD_NODENAME": "g1", "SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "7"}
    assert Place.here(het).name == "g1-job7"
    with pytest.raises(SlurmError, match="SLURM_JOB_ID is not set"):
        Place.here({})


def test_nothing_of_the_job_is_left_in_the_environment_of_its_programs():
    environ = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURMD_NODENAME", "SBATCH_ACCOUNT", "SRUN_DEBUG"), "x"),
        **dict.fromkeys(("PMI_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "I_MPI_PMI_LIBRARY"), "x"),
        "ROLLOUT_SLURM_SCRATCH": "/tmp",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
    }
    assert place.clean(environ).keys() == {"ROLLOUT_SLURM_SCRATCH", "CUDA_VISIBLE_DEVICES", "PATH"}


def test_the_address_to_listen_on_can_be_chosen():
    assert place.address("n1", {"ROLLOUT_SLURM_ADDRESS": "10.0.0.7"}) == "10.0.0.7"
    assert place.address("n1", {"ROLLOUT_SLURM_INTERFACE": "lo"}) == "127.0.0.1"
    with pytest.raises(SlurmError, match=r"ib9.*no such interface"):
        place.address("n1", {"ROLLOUT_SLURM_INTERFACE": "ib9"})


def test_a_job_clears_what_killed_jobs_of_its_service_left_and_nothing_else(scratch):
    remains = [scratch / f"sbx-{os.getuid()}-abcdef-{job}" for job in (1, 2)]
    foreign = scratch / f"sbx-{os.getuid()}-fedcba-1"
    for path in (*remains, foreign):
        (path / "scratch").mkdir(parents=True)
    living = Scratch(scratch, "abcdef", "3")
    mine = Scratch(scratch, "abcdef", "4")
    assert sorted(mine.sweep()) == sorted(path.name for path in remains)
    assert foreign.exists() and living.path.exists() and not any(path.exists() for path in remains)
    living.remove()
    mine.remove()
    assert list(scratch.iterdir()) == [foreign]


def test_scratch_that_is_too_long_for_sockets_is_refused():
    with pytest.raises(SlurmError, match="too long: a socket's path"):
        Scratch(Path("/" + "x" * SOCKET_PATH_MAX), "abcdef", "3")


def test_gpus_are_divided_among_servers():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "ROLLOUT_SLURM_ENGINE_GPUS": "2"}
    assert engine.device_sets(environ) == [["0", "1"], ["2", "3"]]
    assert engine.device_sets(environ | {"ROLLOUT_SLURM_ENGINE_GPUS": "0"}) == [["0", "1", "2", "3"]]
    assert engine.device_sets({}) == [[]]
    with pytest.raises(SlurmError, match="4 GPUs cannot be divided among servers of 3"):
        engine.device_sets(environ | {"ROLLOUT_SLURM_ENGINE_GPUS": "3"})


def test_the_command_of_a_server_names_model_address_and_gpus():
    command = engine.server_command({"ROLLOUT_SLURM_ENGINE_MODEL": "org/m"}, "10.0.0.7", 8000, 2)
    assert command[:3] == ["vllm", "serve", "org/m"] and "--enable-scale-out" in command
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    # A service that an older release began has no token, and workers that would bring none.
    assert "--middleware" not in command
    guarded = {"ROLLOUT_SLURM_ENGINE_MODEL": "org/m", "ROLLOUT_ENGINE_TOKEN_FILE": "/run/token"}
    command = engine.server_command(guarded, "10.0.0.7", 8000, 2)
    assert command[command.index("--middleware") + 1] == "engine_token.RequireToken"
    own = {"ROLLOUT_SLURM_ENGINE_COMMAND": "{python} -m serve 'a b' {host}:{port}"}
    assert engine.server_command(own, "h", 1, 0) == [sys.executable, "-m", "serve", "a b", "h:1"]
    judge = {"ROLLOUT_SLURM_ENGINE_POLICY": "judge", "ROLLOUT_SLURM_ENGINE_MODEL": "/models/{policy}"}
    assert engine.server_command(judge, "h", 1, 0)[:3] == ["vllm", "serve", "/models/judge"]
    own = {"ROLLOUT_SLURM_ENGINE_COMMAND": "serve {policy}"}
    assert engine.server_command(own | judge, "h", 1, 0) == ["serve", "judge"]
    assert engine.server_command(own, "h", 1, 0) == ["serve", "default"]
    with pytest.raises(SlurmError, match="ENGINE_MODEL is not set"):
        engine.server_command({}, "h", 1, 0)
    with pytest.raises(SlurmError, match=r"'gpu'.*the names are"):
        engine.server_command({"ROLLOUT_SLURM_ENGINE_COMMAND": "serve {gpu}"}, "h", 1, 0)
