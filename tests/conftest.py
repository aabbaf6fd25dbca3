"""What several directories of tests share: servers that are slow to start, once a session."""

from __future__ import annotations

import os

import pytest

from tests.helpers.llm_servers import DEMO_MODEL, embedded_server, vllm_missing, vllm_server

# Tests look for what sandboxes leave on the machine, and one kept warm would look left. Tests of the warm
# pool set their own.
os.environ["ROLLOUT_SANDBOX_WARM"] = "0"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """In CI a skipped test is a failed one: what is missing there, the set-up should have installed."""
    report = yield
    if report.skipped and os.environ.get("CI") and item.get_closest_marker("may_skip") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not accept: {call.excinfo.value}"
    return report


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
