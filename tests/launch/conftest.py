"""The private Slurm that all tests of this folder share, and how they submit to it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm import Cluster, missing_programs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def started_cluster() -> Iterator[Cluster]:
    """Fails without Slurm in CI, where it must be installed; elsewhere a skip that says what to install."""
    if missing := missing_programs():
        message = f"no {', '.join(missing)}; fix: tools/ci-packages.sh, or apt-get install slurm-wlm munge"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    folder = Path(tempfile.mkdtemp(prefix="jetrl-slurm-"))  # short: a socket's path has 107 characters
    private = Cluster(folder)
    private.start()
    try:
        yield private
    finally:
        private.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(started_cluster: Cluster) -> Iterator[Cluster]:
    """Without jobs, before and after each test."""
    yield started_cluster
    started_cluster.cancel_all()


@pytest.fixture
def job_environment() -> dict[str, str]:
    """Of a submission: this interpreter, this repository, no check of the nodes."""
    return {"JETRL_ROOT": str(ROOT), "JETRL_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "JETRL_PREFLIGHT": "0"}


@pytest.fixture
def payload_environment(job_environment: dict[str, str]) -> dict[str, str]:
    """The same, with the stand-in for the trainer."""
    return {**job_environment, "JETRL_MODULE": "tests.launch.payload"}
