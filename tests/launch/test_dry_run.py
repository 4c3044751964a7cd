"""The command lines of every launcher, for every shipped configuration, against committed snapshots.

JETRL_UPDATE_SNAPSHOTS=1 writes them anew; then read the difference.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.conftest import ROOT

SNAPSHOTS = Path(__file__).parent / "snapshots"
CONFIGS = sorted(file for folder in ("configs", "configs/runs") for file in (ROOT / folder).glob("*.yaml"))  # no parts
H100 = {"SLURM_GPUS_ON_NODE": "8"}
CONTAINER = {"JETRL_CONTAINER_IMAGE": "/images/jetrl.sqsh", "JETRL_CONTAINER_MOUNTS": "/data:/data"}
CPU = {"JETRL_ENV": "cpu"}
TWO_MACHINES = {
    "JETRL_NNODES": "2",
    "JETRL_NODE_RANK": "1",
    "JETRL_MASTER_ADDR": "fd00::1",
    "JETRL_MASTER_PORT": "29400",
}
CHAIN = ["launch/slurm/chain.sh", "2", "--run-dir", "/runs/a", "CONFIG", "optimizer.lr=1e-6", "--", "-N", "4"]
CASES = {
    "train_cpu": (["bash", "launch/slurm/train.sbatch", "CONFIG", "trainer.num_steps=7"], {}),
    "train_h100": (["bash", "launch/slurm/train.sbatch", "CONFIG", "--run-dir", "/runs/a b"], H100),
    "train_container": (["bash", "launch/slurm/train.sbatch", "CONFIG"], {**H100, **CONTAINER}),
    "array": (["bash", "launch/slurm/array.sbatch", "CONFIG"], {"JETRL_DRY_NODES": "node1"}),
    "chain": (CHAIN, {}),
    "torchrun_one_machine": (["launch/torchrun/run.sh", "CONFIG", "a.b=2"], {**CPU, "JETRL_RANKS_PER_NODE": "2"}),
    "torchrun_two_machines": (["launch/torchrun/run.sh", "CONFIG"], {**CPU, **TWO_MACHINES}),
}


def dry_run(command: list[str], env: dict[str, str], config: Path) -> str:
    """What is printed, without what differs between machines and configurations."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "JETRL_", "SBATCH_"))}
    name = str(config.relative_to(ROOT))
    done = subprocess.run(
        [name if part == "CONFIG" else part for part in command],
        cwd=ROOT,
        env={**kept, "PATH": f"/usr/bin:/bin:{kept['PATH']}", "JETRL_DRY_RUN": "1", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.replace(str(ROOT), "ROOT").replace(name, "CONFIG").replace(config.stem, "NAME")


@pytest.mark.parametrize("case", CASES)
def test_command_lines(case: str) -> None:
    """Every shipped configuration gives the committed command lines, in which only its name differs."""
    command, env = CASES[case]
    file = SNAPSHOTS / f"{case}.txt"
    if os.environ.get("JETRL_UPDATE_SNAPSHOTS") == "1":
        SNAPSHOTS.mkdir(exist_ok=True)
        file.write_text(dry_run(command, env, CONFIGS[0]))
    assert CONFIGS
    for config in CONFIGS:
        assert dry_run(command, env, config) == file.read_text(), config.name


def test_bandwidth_and_preflight_command_lines() -> None:
    """The launchers without a configuration."""
    for script, expected in (
        ("bandwidth_test.sbatch", "--job-name=bandwidth"),
        ("preflight.sh", "--job-name=preflight"),
    ):
        text = dry_run(["bash", f"launch/slurm/{script}"], {}, CONFIGS[0])
        assert expected in text
