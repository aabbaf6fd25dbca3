"""One virtual cluster for all tests of this directory, and what those without one share."""

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


@pytest.fixture
def scratch():
    """Shorter than pytest's own directories: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as directory:
        yield Path(directory)
