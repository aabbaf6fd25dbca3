"""What a job of Slurm sets is seen in no sandbox: the runtimes that the virtual cluster does not run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sandbox.spec import SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient
from tests.helpers.sandboxes import new_state
from tests.sandbox.conftest import why_not

OF_A_JOB = (
    "SLURM_JOB_ID",
    "SLURMD_NODENAME",
    "SLURM_STEP_ID",
    "PMI_RANK",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
)


@pytest.mark.parametrize("runtime", ["bubblewrap", "local-unsafe"])
def test_variables_of_a_job_are_in_no_shell_of_a_sandbox(runtime, monkeypatch):
    if reason := why_not(runtime):
        pytest.skip(reason)
    for name in OF_A_JOB:
        monkeypatch.setenv(name, "of-the-job")
    state = new_state()
    host = SyncHostClient(state)
    try:
        info = host.start(SandboxSpec(runtime=runtime))
        with SyncSandboxClient(info.socket) as client:
            names = client.bash("env | cut -d= -f1").output.split()
            inside = client.bash("python3 -c 'import os; print(dict(os.environ))'").output
        assert "PATH" in names and not set(OF_A_JOB) & set(names)
        assert "PATH" in inside and "of-the-job" not in inside
        pid = host.stats()["pid"]
        assert "of-the-job" not in Path(f"/proc/{pid}/environ").read_text()
    finally:
        host.stop()
        shutil.rmtree(state, ignore_errors=True)
