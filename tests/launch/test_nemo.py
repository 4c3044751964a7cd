"""NeMo-Run as the submitter of our launch scripts. `make test-nemo` makes its environment and runs these tests; without
JETRL_NEMO_PYTHON they are skipped."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.launch.conftest import ROOT
from tests.support.slurm import Cluster

NEMO_PYTHON = os.environ.get("JETRL_NEMO_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NEMO_PYTHON, reason="JETRL_NEMO_PYTHON is unset: make test-nemo"),
]
SNAPSHOT = Path(__file__).parent / "snapshots" / "nemo_slurm.txt"
CONFIG = "configs/quickstart.yaml"
SLURM = ("--executor", "slurm", "--account", "research", "--partition", "batch", "--nodes", "2", "--time", "00:30:00")


def nemo(tmp_path: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [NEMO_PYTHON, str(ROOT / "launch/nemo/run.py"), *arguments, "--run-dir", str(tmp_path / "run")],
        cwd=ROOT,
        env={**environment, "NEMORUN_HOME": str(tmp_path / "nemo")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def environment(cluster: Cluster, payload_environment: dict[str, str]) -> dict[str, str]:
    return {**cluster.environment, **payload_environment}


@pytest.mark.parametrize(("mode", "code"), [("done", 0), ("stall", 1)])
def test_local_exit_codes(tmp_path: Path, environment: dict[str, str], mode: str, code: int) -> None:
    """A task that fails is a failure, although NeMo-Run itself ends with 0 then."""
    done = nemo(tmp_path, environment, CONFIG, f"mode={mode}", "--executor", "local")
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]


def test_slurm_dry_run(tmp_path: Path, environment: dict[str, str]) -> None:
    """The batch script that NeMo-Run would submit, against a snapshot: one task that runs our script."""
    done = nemo(tmp_path, environment, CONFIG, "mode=done", *SLURM, "--dry-run")
    assert done.returncode == 0, done.stderr
    (script,) = (tmp_path / "nemo").rglob("*_sbatch.sh")
    text = script.read_text()
    for found, name in ((str(tmp_path), "TMP"), (str(ROOT), "ROOT"), (environment["JETRL_PYTHON"], "PYTHON")):
        text = text.replace(found, name)
    text = re.sub(r"jetrl_\d+", "jetrl_ID", text.replace("ROOT/.venv/bin/python", "PYTHON"))
    if os.environ.get("JETRL_UPDATE_SNAPSHOTS") == "1":
        SNAPSHOT.write_text(text)
    assert text == SNAPSHOT.read_text()


def test_slurm_job_completes(tmp_path: Path, environment: dict[str, str], cluster: Cluster) -> None:
    """Submitted to a real Slurm: our script, inside NeMo-Run's one task, starts both nodes and the job completes."""
    done = nemo(tmp_path, environment, CONFIG, "mode=done", *SLURM, "--detach")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    job_id = cluster.command("squeue", "-h", "--states=all", "-o", "%i").split()[0]
    job = cluster.wait(job_id, 120)
    logs = "\n".join(p.read_text(errors="replace") for p in (tmp_path / "nemo").rglob("log-*.out"))
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), logs
    assert sorted(p.name for p in (tmp_path / "run").glob("pid_*")) == ["pid_0", "pid_1"]


def test_users_errors(tmp_path: Path, environment: dict[str, str]) -> None:
    """One line and code 2, also where NeMo-Run is missing or its leptonai is one that breaks it."""
    absent = nemo(tmp_path, environment, "absent.yaml", "--executor", "local")
    (tmp_path / "broken/nemo_run").mkdir(parents=True)
    (tmp_path / "broken/nemo_run/__init__.py").write_text("import leptonai.absent_module\n")
    broken = nemo(tmp_path, {**environment, "PYTHONPATH": str(tmp_path / "broken")}, CONFIG, "--executor", "local")
    for done, message in ((absent, "CONFIG=absent.yaml"), (broken, "pip install nemo-run==0.11.1 leptonai==0.27.3")):
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert message in line
