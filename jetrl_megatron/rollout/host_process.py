"""Where an engine's host process runs: on this node, or on another one, started there by that node's first rank.

On another node a thread of the first training rank listens (`HostStarter`). It starts the host with the accepted
socket, so that rank 0 talks to the host itself from then on, as it does to a local one; weights follow the same way.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Protocol

from jetrl_megatron.rollout.engine import EngineSpec
from jetrl_megatron.rollout.environment import PRECISION_FLOW, engine_environment
from jetrl_megatron.weights.bundle import MANIFEST, Bundle

Command = tuple[str, object]
EXIT_TIMEOUT_S = 20.0


class HostProcess(Protocol):
    """One host, started. connection: to the host."""

    connection: Connection

    def deliveries(self, bundle: Bundle) -> Iterator[Command]:
        """Commands for the host, after which it has the bundle at `bundle_path`."""

    def bundle_path(self, bundle: Bundle) -> Path:
        """Where the host finds the bundle."""

    def wait(self) -> None:
        """Give the host time to end by itself."""

    def kill(self) -> int | None:
        """SIGKILL to the host and everything it started. Returns its exit code, where known."""


def popen_host(spec: EngineSpec, descriptor: int) -> subprocess.Popen[bytes]:
    """The host process, in a session of its own, answering on the socket `descriptor`."""
    spec.log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(spec.log_file, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "jetrl_megatron.rollout.host", str(descriptor)],
            pass_fds=[descriptor],
            env={
                **engine_environment(spec.num_threads, spec.tensor_parallel),
                PRECISION_FLOW: str(spec.flow_folder.absolute()),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def end_group(process: subprocess.Popen[bytes]) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


class LocalHost:
    """A host on this node; it reads the trainer's bundle where it is."""

    def __init__(self, spec: EngineSpec) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self._process = popen_host(spec, theirs.fileno())
        theirs.close()

    def deliveries(self, bundle: Bundle) -> Iterator[Command]:
        yield from ()

    def bundle_path(self, bundle: Bundle) -> Path:
        return bundle.path

    def wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)

    def kill(self) -> int | None:
        code = end_group(self._process)
        self.connection.close()
        return code


@dataclass(frozen=True)
class StarterAddress:
    """How to reach a `HostStarter`: numeric address, port, and the key both ends prove to know."""

    host: str
    port: int
    key: bytes

    def connect(self) -> Connection:
        return Client((self.host, self.port), family=_family(self.host), authkey=self.key)


class HostStarter:
    """On the first rank of a node: starts hosts for rank 0. They end with this rank, as local ones do with theirs."""

    def __init__(self, address: str) -> None:
        key = secrets.token_bytes(32)
        self._listener = Listener((address, 0), family=_family(address), backlog=16, authkey=key)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.address = StarterAddress(address, self._listener.address[1], key)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
                command, argument = connection.recv()
            except (AuthenticationError, EOFError, ConnectionError):
                continue  # not ours
            if command == "start":
                process = popen_host(argument, connection.fileno())
                self._processes[process.pid] = process
                connection.send(process.pid)
            elif command == "kill" and argument in self._processes:
                connection.send(end_group(self._processes.pop(argument)))
            connection.close()


class RemoteHost:
    """A host on another node. Raises OSError if that node's starter is gone."""

    def __init__(self, spec: EngineSpec, starter: StarterAddress) -> None:
        self._starter = starter
        self._name = spec.log_file.stem
        self.connection = starter.connect()
        self.connection.send(("start", spec))
        self._pid: int = self.connection.recv()

    def deliveries(self, bundle: Bundle) -> Iterator[Command]:
        """Every file of the bundle, the manifest last: a bundle is whole or is none."""
        for name in (*bundle.files, MANIFEST):
            yield "receive_file", (str(self.bundle_path(bundle) / name), (bundle.path / name).read_bytes())

    def bundle_path(self, bundle: Bundle) -> Path:
        """Beside the trainer's own, also where two nodes share a file system."""
        staging = bundle.path.parent
        return staging.with_name(f"{staging.name}-{self._name}") / bundle.path.name

    def wait(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            if self.connection.poll(EXIT_TIMEOUT_S):
                self.connection.recv()  # the end of the file: the host is gone

    def kill(self) -> int | None:
        self.connection.close()
        try:
            with self._starter.connect() as starter:
                starter.send(("kill", self._pid))
                return int(starter.recv())
        except (OSError, EOFError):
            return None  # its node's rank has ended, and the host with it


def _family(address: str) -> str:
    return "AF_INET6" if ":" in address else "AF_INET"
