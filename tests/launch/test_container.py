"""Jobs in containers: every step of a training job runs in the image, with the folders that it needs mounted.

A real Slurm; in place of pyxis a plugin with its options that enters a folder (container_plugin.c).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import ROOT
from tests.support.slurm import Cluster, missing_programs

pytestmark = [pytest.mark.slow, pytest.mark.multi]
SOURCE = Path(__file__).with_name("container_plugin.c")
SPANK = Path("/usr/include/slurm/spank.h")
PYTHON = "/opt/image/python"  # exists in the image only


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A private Slurm with the plugin. Fails in CI where it cannot be had; elsewhere a skip that says why."""
    faults = [f"no {program}" for program in (*missing_programs(), *(() if shutil.which("cc") else ("cc",)))]
    if not SPANK.is_file():
        faults.append(f"no {SPANK} (libslurm-dev)")
    if os.geteuid():
        faults.append("not root, which a task needs to enter a container")
    if faults:
        message = f"{'; '.join(faults)}; fix: tools/ci-packages.sh, as root"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    folder = Path(tempfile.mkdtemp(prefix="jetrl-slurm-"))
    plugin = folder / "container_plugin.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", plugin, SOURCE], check=True)
    (folder / "plugstack.conf").write_text(f"required {plugin}\n")
    private = Cluster(folder)
    private.start()
    try:
        yield private
    finally:
        private.stop()
        shutil.rmtree(folder, ignore_errors=True)


def make_image(folder: Path) -> Path:
    """A folder with an interpreter that is nowhere else, and the mounts without which that finds no packages."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    python = folder / PYTHON.lstrip("/")
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


def packages() -> str:
    """Mounts that stand for the Python packages of an image."""
    found = {sys.prefix, sys.base_prefix, *(entry for entry in sys.path if Path(entry).is_dir())}
    outside = sorted(entry for entry in found if not entry.startswith(("/usr/", f"{ROOT}/")) and entry != str(ROOT))
    return ",".join(f"{entry}:{entry}" for entry in outside)


def test_every_step_runs_in_the_container(
    cluster: Cluster, payload_environment: dict[str, str], tmp_path: Path
) -> None:
    """train.sbatch with an image completes on two nodes: the check (one task) and the training (one per node) ran in
    the image, whose interpreter is nowhere else; the folder of submission, the repository and the run folder were
    mounted there at their paths, so the run's files are where they belong. Nodes are cleaned up outside of it."""
    image = make_image(tmp_path / "image")
    (tmp_path / "work").mkdir()
    environment = {
        **payload_environment,
        "JETRL_PYTHON": PYTHON,
        "JETRL_CONTAINER_IMAGE": str(image),
        "JETRL_CONTAINER_MOUNTS": packages(),
    }
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    arguments = ["--nodes=2", "--output=job.log", str(ROOT / "launch/slurm/train.sbatch")]
    arguments += [str(ROOT / "configs/quickstart.yaml"), "mode=done", "--run-dir", str(run_dir)]
    job_id = cluster.submit(*arguments, cwd=tmp_path / "work", env=environment)
    job = cluster.wait(job_id, 150)
    log = (tmp_path / "work" / "job.log").read_text()
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), log
    assert sorted((image / "steps").read_text().split()) == [f"{job_id}.0", f"{job_id}.1", f"{job_id}.1"]
    assert {path.name for path in run_dir.iterdir()} >= {"arguments_0", "arguments_1", "status.json"}
