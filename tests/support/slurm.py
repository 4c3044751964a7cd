"""A private two-node Slurm on this machine, from nothing: own munge key, socket, ports, configuration, spool and state.

Works with Debian's slurm-wlm 22.05 and 24.11, as root or not, beside a system Slurm and beside other private ones.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.launch import free_port

PROGRAMS = (
    "munged",
    "munge",
    "unmunge",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "sinfo",
    "squeue",
    "scancel",
)
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
START_S, STOP_S = 20.0, 5.0
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


@dataclass(frozen=True)
class Job:
    """One row of `scontrol show job`."""

    id: str
    state: str
    exit_code: str  # CODE:SIGNAL
    restarts: int
    fields: Mapping[str, str]


class Cluster:
    """Nodes n1 and n2, partitions `batch` (preemptible, requeues) and `high`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._conf = folder / "slurm.conf"
        self._pid_files = [folder / "run" / f"{name}.pid" for name in ("slurmd-n1", "slurmd-n2", "slurmctld", "munged")]

    @property
    def environment(self) -> dict[str, str]:
        """For commands: without what an outer Slurm or torchrun has set."""
        foreign = (
            "SLURM_",
            "SBATCH_",
            "SRUN_",
            "TORCHELASTIC_",
            "JETRL_",
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "MASTER_",
        )
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**kept, "SLURM_CONF": str(self._conf), "PATH": PATH, "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        """Raises RuntimeError with the ends of all logs unless both nodes are idle within START_S."""
        for name in ("run", "log", "state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self._conf.write_text(self._configuration())
        if self._version() >= (23, 0):  # 22.05 knows no such value, and asks for no cgroups
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        run, log = self.folder / "run", self.folder / "log"
        try:
            self.command(
                "munged",
                "--force",
                f"--key-file={key}",
                f"--socket={run / 'munge.sock'}",
                f"--pid-file={run / 'munged.pid'}",
                f"--log-file={log / 'munged.log'}",
                f"--seed-file={self.folder / 'munge.seed'}",
            )
            self.command("slurmctld", "-c")
            for node in ("n1", "n2"):
                self.command("slurmd", "-N", node)
            wait_for(lambda: self._num_idle() == 2, START_S, "both nodes idle")
        except (AssertionError, subprocess.CalledProcessError) as error:
            detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
            tails = "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in sorted(log.iterdir()))
            self.stop()
            raise RuntimeError(f"the private Slurm did not start: {detail}\n{tails}") from error

    def stop(self) -> None:
        """All daemons and the steps' own: TERM, STOP_S seconds, KILL."""
        with contextlib.suppress(AssertionError):
            self.cancel_all()
        processes = [process for path in self._pid_files if (process := _process(path)) is not None]
        for process in processes:  # one after the other: slurmd says goodbye to slurmctld
            _end(process)
        for process in psutil.process_iter(["name", "environ"]):
            mine = (process.info["environ"] or {}).get("SLURM_CONF") == str(self._conf)
            if mine and process.info["name"].startswith(("slurmstepd", "slurmd", "srun")):
                _end(process)

    def command(self, *arguments: str, check: bool = True, **env: str) -> str:
        """Standard output of a Slurm command."""
        done = subprocess.run(
            arguments,
            env={**self.environment, **env},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=check,
        )
        return done.stdout.strip()

    def submit(self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """sbatch; the job's id."""
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            env={**self.environment, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job_id: str) -> Job:
        text = self.command("scontrol", "show", "job", "-o", job_id).splitlines()[0]
        fields = dict(re.findall(r"(\S+?)=(\S*)", text))
        return Job(job_id, fields["JobState"], fields["ExitCode"], int(fields["Restarts"]), fields)

    def wait(self, job_id: str, timeout_s: float, *states: str) -> Job:
        """Until the job is in one of `states` (default: ended)."""
        wanted = states or FINAL
        wait_for(lambda: self.job(job_id).state in wanted, timeout_s, f"job {job_id} in {'/'.join(wanted)}")
        return self.job(job_id)

    def release(self, job_id: str) -> None:
        """A requeued job waits two minutes; not in a test. Returns when it runs, or has run, again."""
        self.wait(job_id, 30, "PENDING")
        time.sleep(2.5)  # started within the second of its revocation, a job's credential counts as revoked

        def started() -> bool:
            self.command("scontrol", "update", f"jobid={job_id}", "StartTime=now", check=False)
            return self.job(job_id).state in ("RUNNING", "COMPLETING", *FINAL)

        wait_for(started, 30, f"job {job_id} running again", poll_s=0.5)

    def cancel_all(self) -> None:
        """No job is left, queued or running."""
        if self.command("squeue", "-h", check=False):
            self.command("scancel", f"--user={getpass.getuser()}", check=False)
            wait_for(lambda: not self.command("squeue", "-h", check=False), 20, "no job left")

    def _num_idle(self) -> int:
        idle = self.command("sinfo", "-h", "-p", "batch", "-N", "-t", "idle", "-o", "%N", check=False)
        return len(set(idle.split()))

    def _version(self) -> tuple[int, int]:
        found = re.search(r"(\d+)\.(\d+)", self.command("slurmd", "-V"))
        assert found is not None
        return int(found[1]), int(found[2])

    def _configuration(self) -> str:
        folder, user = self.folder, getpass.getuser()
        host = socket.gethostname().split(".")[0]
        port, port_1, port_2 = (free_port() for _ in range(3))
        memory_mib = psutil.virtual_memory().total // 2**20 * 2 // 5
        node = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory={memory_mib}"
        return f"""ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock
CredType=cred/munge
FirstJobId={random.randrange(1000, 60000)}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerTimeSlice=5
SchedulerParameters=sched_min_interval=100000
ReturnToService=2
KillWait=5
JobRequeue=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
PropagateResourceLimitsExcept=MEMLOCK
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 {node} Port={port_1}
NodeName=n2 {node} Port={port_2}
PartitionName=batch Nodes=n[1-2] Default=YES MaxTime=1-00:00:00 State=UP PriorityTier=1
PartitionName=high Nodes=n[1-2] MaxTime=1-00:00:00 State=UP PriorityTier=10 PreemptMode=OFF
"""


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str, poll_s: float = 0.2) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(poll_s)


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Running processes that have NAME=VALUE in their environment."""
    found = []
    for process in psutil.process_iter(["status", "environ"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and (process.info["environ"] or {}).get(name) == value:
            found.append(process)
    return found


def describe(processes: Sequence[psutil.Process]) -> list[str]:
    lines = []
    for process in processes:
        try:
            lines.append(f"{process.pid}: {' '.join(process.cmdline())[:150]}")
        except psutil.NoSuchProcess:
            continue
    return lines


def _process(pid_file: Path) -> psutil.Process | None:
    try:
        return psutil.Process(int(pid_file.read_text()))
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None


def _end(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
    except psutil.TimeoutExpired:
        process.kill()
    except psutil.NoSuchProcess:
        pass
