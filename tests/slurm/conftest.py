"""One virtual cluster for all tests of this directory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster

NODES = 5
"""Four for rollouts, which are alone on theirs, and one for the head."""


@pytest.fixture(scope="package")
def cluster():
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with SlurmCluster(directory, nodes=NODES, gpu_nodes=1) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)
