"""A worker process for reward functions, so that one that hangs can be killed.

Threads cannot be stopped and SIGALRM cannot interrupt C code, so the function runs in a process of its own: a fresh
interpreter (no fork of a process with torch threads, no second import of `__main__`), in its own session, so that what
it started dies with it. It lives across calls and is replaced after a timeout or a crash.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection

from jetrl_megatron.samples import Prompt

START_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 2.0
ORPHAN_GRACE_S = 10.0
MAX_ERROR_CHARS = 500

_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from jetrl_megatron.rl.reward_worker import serve; serve(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))"
)


class RewardFailure(Exception):
    """One call of a reward function failed."""


class RewardWorker:
    """Parent's side. kind: a reward kind (`rewards.resolve`). timeout_s: per call, not counting the start."""

    def __init__(self, kind: str, timeout_s: float) -> None:
        self._kind, self._timeout_s = kind, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def call(self, prompt: Prompt, text: str) -> dict[str, float]:
        """Parts of the reward. Raises RewardFailure if the function raises, returns something else, exits or takes
        longer than timeout_s; ValueError if the function cannot be loaded."""
        connection = self._started()
        try:
            connection.send((prompt, text))
            if not connection.poll(self._timeout_s):
                self.close()
                raise RewardFailure(f"no result within reward.timeout_s = {self._timeout_s:g} s; the worker was killed")
            status, result = connection.recv()
        except (EOFError, OSError) as error:
            raise RewardFailure(f"the worker process died ({self._exit_code()})") from error
        if status != "ok":
            raise RewardFailure(str(result))
        return dict(result)

    def close(self) -> None:
        """Kills the worker and everything it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _exit_code(self) -> str:
        """How the worker ended. Its pipe closes a little before it does, so this waits for it, then kills."""
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):  # closed its pipe and went on: killed below, code -9
            process.wait(EXIT_TIMEOUT_S)
        self.close()
        return f"exit code {process.returncode}"

    def _started(self) -> Connection:
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self.close()
        parent, child = multiprocessing.Pipe()
        arguments = [json.dumps(sys.path), str(child.fileno()), self._kind, str(self._timeout_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a user's function prints must not mix with the command's output
            pass_fds=[child.fileno()],
            start_new_session=True,
        )
        child.close()
        self._connection = parent
        try:
            status, result = parent.recv() if parent.poll(START_TIMEOUT_S) else ("error", "not loaded in time")
        except EOFError:
            status, result = "error", f"the worker process died ({self._exit_code()})"
        if status != "ok":
            self.close()
            raise ValueError(f"reward.kind: {self._kind!r} cannot be loaded: {result}; fix: the module or reward.kind")
        return parent


def serve(fd: int, kind: str, timeout_s: float) -> None:
    """Worker's side: loads the function, then answers calls until the parent closes the pipe.

    The broad `except` is the purpose of this process: every error of a user's function travels to the parent.
    """
    from jetrl_megatron.rl.rewards import checked_parts, resolve

    connection = Connection(fd)
    try:
        spec = resolve(kind)
        for module in spec.preload:
            importlib.import_module(module)
    except Exception as error:
        connection.send(("error", _describe(error)))
        return
    connection.send(("ok", None))
    while True:
        try:
            prompt, text = connection.recv()
        except EOFError:
            return
        # Should the parent die during a hang, the kernel's default action for SIGALRM ends this process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_GRACE_S)
        reply: tuple[str, object]
        try:
            reply = ("ok", checked_parts(spec.function(prompt, text)))
        except Exception as error:
            reply = ("error", _describe(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(reply)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
