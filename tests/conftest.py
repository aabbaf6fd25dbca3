"""What several directories of tests share: servers that are slow to start, once a session."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import ssl
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterable
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from sandbox import paths
from tests.helpers.llm_servers import DEMO_MODEL, embedded_server, vllm_missing, vllm_server

# Tests look for what sandboxes leave on the machine, and one kept warm would look left. Tests of the warm
# pool set their own.
os.environ["ROLLOUT_SANDBOX_WARM"] = "0"
# Tests of the host, and controls of attacks, need no walls.
os.environ["ROLLOUT_SANDBOX_RUNTIMES"] = "auto,local-unsafe"
# The images of `helpers/swe_instances.py` are directories.
os.environ["ROLLOUT_SANDBOX_IMAGE_ROOTS"] = str(paths.rollout_home() / "swe")
# Nor may INIT stop because the machine of the tests is short of something; tests of that set their own.
os.environ["ROLLOUT_NODE_MIN_FREE_DISK_MB"] = os.environ["ROLLOUT_NODE_MIN_FREE_MEMORY_MB"] = "0"
# Workers of whole stacks import what makes tokenizers with their first rollout that needs one, as in `FAST`.
os.environ["ROLLOUT_PRELOAD_TOKENIZERS"] = "0"
# What is started here sees what its extra installs, as `tests.helpers.stack.AS_DEPLOYED` says.
SEEN = [str(Path(__file__).parent / "helpers" / "as_deployed"), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, SEEN))

# What tests start is nobody's service, and what this account runs is no test's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rollout-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Each client of HTTP reads all authorities of the machine, 30 ms of a processor, and thousands are made here,
# of which none speaks TLS. One authority is enough for them; pip, which may ask an index, is left all.
for authority in ssl.create_default_context().get_ca_certs(binary_form=True)[:1]:
    file = Path(os.environ["XDG_STATE_HOME"], "authority.pem")
    file.write_text(ssl.DER_cert_to_PEM_cert(authority))
    if "SSL_CERT_FILE" in os.environ:
        os.environ.setdefault("PIP_CERT", os.environ["SSL_CERT_FILE"])
    os.environ["SSL_CERT_FILE"] = str(file)

# A run in the background of a shell ignores Ctrl-C, and so would the programs whose Ctrl-C is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What collecting makes stays to the end: to look through it for garbage takes half of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """In CI a skipped test is a failed one: what is missing there, the set-up should have installed."""
    report = yield
    if report.skipped and os.environ.get("CI") and item.get_closest_marker("may_skip") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not accept: {call.excinfo.value}"
    return report


SHARED = {
    # Both engines, for tests that use one alone or both behind a service; nobody else starts vLLM.
    "engines": ("tests/contract/", "tests/inference/test_embedded_", "tests/integration/test_rollouts.py"),
    # Redis, gateway, three fleets, the embedded engine.
    "service": tuple(
        f"tests/integration/test_{name}.py"
        for name in (
            *("alerts", "api", "autoscale", "backends_api", "cancel", "cli", "docs", "environments"),
            *("exports", "faults", "fleet", "flower", "policy_tokens", "results", "scorers", "slots", "top"),
            *("policy_examples", "trainer_records", "typed_arrays", "webhooks"),
        )
    ),
    "broken service": tuple(
        f"tests/chaos/test_{name}.py" for name in ("batches", "connections", "handlers", "outages", "workers")
    ),
    "cluster": ("tests/slurm/test_autoscale", "tests/slurm/test_cluster", "tests/slurm/test_forms"),
    # Redis, gateway, three fleets, two processes of capture, an engine whose model plays plans.
    "captured": tuple(
        f"tests/integration/test_{name}"
        for name in ("capture.py", "capture_faults", "driven_handlers", "example_agents", "harness_programs")
    ),
    # Redis, gateway, a worker whose model plays plans; the first file needs it without the worker.
    "compatibility": ("tests/integration/compatibility/",),
    # Redis, gateway, a worker, a scripted engine and one browser.
    "page": ("tests/page/",),
    # The first of them makes repositories and finds out which tests fail; the others would only wait for it.
    "instances": ("tests/swe/",),
}
"""Files that use servers together: one process does them all, one after the other."""
SERVERS = {"stack", "service", "captured", "cluster", "vllm", "embedded", "rows"}
"""Fixtures of the session or a package that only such files may use: each process would start its own."""


def shared(nodeid: str) -> str | None:
    """The name of what the test shares with other files, or None."""
    return next((name for name, files in SHARED.items() if nodeid.startswith(files)), None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A server that is started in every process costs more than most tests."""
    for name in SERVERS.intersection(item.fixturenames) if shared(item.nodeid) is None else ():
        if item._fixtureinfo.name2fixturedefs[name][-1].scope in ("session", "package"):
            pytest.fail(f"it uses {name!r}: add its file to SHARED in tests/conftest.py", pytrace=False)


SECONDS = {
    "tests/attacks/test_gateway.py": 36,
    "tests/attacks/test_harbor_reward.py": 90,
    "tests/attacks/test_server.py": 110,
    "tests/attacks/test_swe_reward.py": 155,
    "tests/chaos/test_batches.py": 34,
    "tests/chaos/test_clocks.py": 30,
    "tests/chaos/test_handlers.py": 37,
    "tests/chaos/test_outages.py": 73,
    "tests/chaos/test_soak.py": 150,
    "tests/chaos/test_workers.py": 29,
    "tests/contract/test_engine_contract.py": 90,
    "tests/contract/test_llm_contract.py": 30,
    "tests/contract/test_weight_updates.py": 50,
    "tests/environments/test_bfcl.py": 10,
    "tests/environments/test_games.py": 15,
    "tests/environments/test_process.py": 20,
    "tests/environments/test_servers.py": 25,
    "tests/environments/test_tau2.py": 15,
    "tests/environments/test_verifiers.py": 40,
    "tests/harbor/test_examples.py": 45,
    "tests/inference/test_engine.py": 50,
    "tests/integration/compatibility/test_nemo_gym.py": 20,
    "tests/integration/compatibility/test_prorl.py": 30,
    "tests/integration/test_benchmarks.py": 60,
    "tests/integration/test_builtin_handlers.py": 26,
    "tests/integration/test_capture.py": 150,
    "tests/integration/test_capture_faults.py": 120,
    "tests/integration/test_capture_state.py": 40,
    "tests/integration/test_engine_streams.py": 60,
    "tests/integration/test_example_agents.py": 100,
    "tests/integration/test_failover.py": 209,
    "tests/integration/test_faults.py": 57,
    "tests/integration/test_forks.py": 35,
    "tests/integration/test_harness_pack.py": 60,
    "tests/integration/test_harness_programs.py": 120,
    "tests/integration/test_intake.py": 57,
    "tests/integration/test_moved.py": 50,
    "tests/integration/test_policy_updates.py": 43,
    "tests/integration/test_recovery.py": 54,
    "tests/integration/test_redis_ops.py": 57,
    "tests/integration/test_rollouts.py": 75,
    "tests/integration/test_takeover.py": 166,
    "tests/integration/test_training.py": 82,
    "tests/integration/test_two_releases.py": 45,
    "tests/integration/test_webhooks.py": 39,
    "tests/integration/test_weight_transfer.py": 55,
    "tests/local/test_guides.py": 212,
    "tests/local/test_stack.py": 230,
    "tests/local/test_upgrade.py": 200,
    "tests/page/test_export.py": 12,
    "tests/page/test_hostile.py": 25,
    "tests/page/test_live.py": 35,
    "tests/page/test_look.py": 50,
    "tests/page/test_rollout_view.py": 15,
    "tests/page/test_sign_in.py": 12,
    "tests/page/test_views.py": 25,
    "tests/page/test_walls.py": 20,
    "tests/sandbox/test_attacks.py": 97,
    "tests/sandbox/test_bridge.py": 60,
    "tests/sandbox/dockerfile/test_building.py": 25,
    "tests/sandbox/test_exec.py": 31,
    "tests/sandbox/test_image_builds.py": 15,
    "tests/sandbox/test_ipython.py": 38,
    "tests/sandbox/test_robustness.py": 65,
    "tests/sandbox/test_shell_input.py": 45,
    "tests/sandbox/test_snapshots.py": 40,
    "tests/sandbox/test_snapshots_of_attackers.py": 20,
    "tests/sandbox/test_unprivileged.py": 100,
    "tests/slurm/test_cluster.py": 54,
    "tests/slurm/test_cluster_run.py": 270,
    "tests/slurm/test_preempted.py": 60,
    "tests/swe/test_datasets.py": 45,
    "tests/swe/test_instances.py": 41,
    "tests/swe/test_patches.py": 60,
    "tests/swe/test_specifications.py": 10,
    "tests/task_checks/test_faults.py": 60,
    "tests/task_checks/test_packages.py": 25,
    "tests/unit/capture/test_chains.py": 30,
    "tests/unit/capture/test_fuzz.py": 30,
    "tests/unit/test_engine_streams.py": 50,
    "tests/unit/test_published_formats.py": 30,
    "tests/unit/test_swe_judging.py": 15,
}
"""About what a file takes, or the longest test of one whose tests run apart; a test of another file 0.3 s.
Only for the order."""


def _seconds(nodeids: Iterable[str]) -> float:
    tests = Counter(nodeid.split("::")[0] for nodeid in nodeids)
    return sum(SECONDS.get(file, 0.3 * count) for file, count in tests.items())


class _LongestFirst(OrderedDict):
    """What is to be done, by what it takes: a long file that begins last keeps one process busy alone."""

    def popitem(self, last=True):
        scope = max(self, key=lambda scope: _seconds(self[scope]))
        return scope, self.pop(scope)


class ByFile(LoadScopeScheduling):
    """With `-n 2`: a file stays in one process, and so do all files that share what is slow to start."""

    def schedule(self):
        if self.collection is None:
            self.workqueue = _LongestFirst()
        super().schedule()

    def _split_scope(self, nodeid):
        # Each benchmark and each form of the soak starts what it needs by itself.
        alone = "test_benchmarks.py" in nodeid or "test_soak.py" in nodeid
        return nodeid if alone else shared(nodeid) or nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`--dist loadgroup` would do, but xdist 3.8 writes its groups where pytest 9.2 does not read them."""
    return ByFile(config, log)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A Redis of the file's own, for tests of what is kept there."""
    # Not at the top: tests of a plain user's sandboxes run by the machine's Python, without our libraries.
    from tests.helpers.stack import RedisServer

    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def embedded():
    """The embedded backend with the demo model. Whoever changes its weights puts them back."""
    with embedded_server() as server:
        yield server


@pytest.fixture(scope="session")
def vllm():
    """Stock vLLM on the CPU with the demo model; skipped where its environment has not been made."""
    if reason := vllm_missing():
        pytest.skip(reason)
    with vllm_server() as server:
        yield server


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory):
    """A checkpoint with the demo model's shapes and other weights."""
    from tests.helpers.llm_reference import perturbed_copy

    return perturbed_copy(DEMO_MODEL, tmp_path_factory.mktemp("weights") / "step-1")
