"""Client of one engine host process, and a pool of several that restarts the dead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from jetrl_megatron.ops.precision_flow import Graph
from jetrl_megatron.rollout.engine import Completion, EngineDiedError, EngineRefusedError, EngineSpec, Request
from jetrl_megatron.rollout.host_process import HostProcess, LocalHost, RemoteHost, StarterAddress
from jetrl_megatron.weights.bundle import Bundle


class SglangEngine:
    """One real `sglang.Engine` in a process of its own, on this node or on that of `starter`."""

    def __init__(
        self,
        spec: EngineSpec,
        start_timeout_s: float,
        request_timeout_s: float,
        starter: StarterAddress | None = None,
    ) -> None:
        self._spec = spec
        self._request_timeout_s = request_timeout_s
        try:
            self._host: HostProcess = RemoteHost(spec, starter) if starter is not None else LocalHost(spec)
        except (OSError, EOFError) as error:
            raise EngineDiedError(f"engine could not be started on another node: {error}") from error
        self._connection = self._host.connection
        self._connection.send(spec)
        self._start_timeout_s = start_timeout_s
        self._started = False

    def wait_until_started(self) -> None:
        """Raises EngineDiedError when it does not come up in time."""
        if not self._started:
            self._receive(self._start_timeout_s)
            self._started = True

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions: list[Completion] = self._call("generate", list(requests))
        return completions

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scores: list[list[float]] = self._call("score", [list(s) for s in sequences])
        return scores

    def record_flow(self, request: Request) -> list[Graph]:
        graphs: list[Graph] = self._call("record_flow", request)
        return graphs

    def load_weights(self, bundle: Bundle) -> None:
        for command, argument in self._host.deliveries(bundle):
            self._call(command, argument)
        digest = self._call("load_weights", (str(self._host.bundle_path(bundle)), bundle.version))
        if digest != bundle.digest:
            raise EngineRefusedError(f"engine digest {digest}, trainer digest {bundle.digest}; the weights differ")

    def child_pids(self) -> list[int]:
        """Process ids of SGLang's children."""
        pids: list[int] = self._call("pids", None)
        return pids

    def shutdown(self) -> None:
        """Ask, wait, then kill the whole process group."""
        with contextlib.suppress(OSError):
            self._connection.send(("shutdown", None))
            self._host.wait()
        self.kill()

    def kill(self) -> int | None:
        """SIGKILL to the host and everything it started. Returns its exit code, where known."""
        return self._host.kill()

    def _call(self, command: str, argument: Any) -> Any:
        self.wait_until_started()
        try:
            self._connection.send((command, argument))
        except OSError as error:
            raise self._died(command) from error
        return self._receive(self._request_timeout_s)

    def _receive(self, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise self._died(f"no answer within {timeout_s:.0f} s")
            status, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died("connection closed") from error
        if status == "refused":
            raise EngineRefusedError(value)
        return value

    def _died(self, what: str) -> EngineDiedError:
        code = self.kill()
        tail = self._spec.log_file.read_bytes()[-2000:].decode(errors="replace")
        return EngineDiedError(f"engine ({what}), exit code {code}, log ends:\n{tail}")


class EnginePool:
    """`num_engines` engines that share the prompts. A dead engine is started again with the current weights and its
    requests are sent again: draws are seeded per request, so nothing changes but the time."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        start_timeout_s: float,
        request_timeout_s: float,
        max_restarts: int,
        starters: Sequence[StarterAddress | None] | None = None,
    ) -> None:
        """starters: of each engine's node; None: this node."""
        self._specs = list(specs)
        self._starters = [None] * len(self._specs) if starters is None else list(starters)
        self._timeouts = (start_timeout_s, request_timeout_s)
        self._restarts_left = max_restarts
        self.num_restarts = 0
        self._bundle: Bundle | None = None
        self._lock = threading.Lock()
        self._engines = [self._start(i) for i in range(len(self._specs))]

    def _start(self, i: int) -> SglangEngine:
        return SglangEngine(self._specs[i], *self._timeouts, self._starters[i])

    @property
    def engines(self) -> list[SglangEngine]:
        return self._engines

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Requests are dealt in contiguous shares, so that a prompt's samples meet in one prefix cache."""
        count = len(self._engines)
        bounds = [len(requests) * i // count for i in range(count + 1)]
        shares = [requests[a:b] for a, b in pairwise(bounds)]
        answers = self._on_all(lambda i: self._engines[i].generate(shares[i]) if shares[i] else [])
        return [completion for answer in answers for completion in answer]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._on_all(lambda i: self._engines[i].score(sequences) if i == 0 else [])[0]

    def record_flow(self, request: Request) -> list[Graph]:
        """Graphs of all ranks of all engines."""
        answers = self._on_all(lambda i: self._engines[i].record_flow(request))
        return [graph for answer in answers for graph in answer]

    def load_weights(self, bundle: Bundle) -> None:
        self._on_all(lambda i: self._engines[i].load_weights(bundle))
        self._bundle = bundle

    def shutdown(self) -> None:
        for engine in self._engines:
            engine.shutdown()

    def _on_all(self, action: Callable[[int], Any]) -> list[Any]:
        """Run `action` for every engine at once; the first error is raised after all have ended."""
        results: list[Any] = [None] * len(self._engines)
        errors: list[BaseException] = []

        def run(i: int) -> None:
            try:
                results[i] = self._with_restart(i, action)
            except (EngineDiedError, EngineRefusedError) as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(self._engines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def _with_restart(self, i: int, action: Callable[[int], Any]) -> Any:
        while True:
            try:
                return action(i)
            except EngineDiedError:
                with self._lock:
                    if self._restarts_left == 0:
                        raise
                    self._restarts_left -= 1
                    self.num_restarts += 1
                self._engines[i] = self._start(i)
                if self._bundle is not None:
                    self._engines[i].load_weights(self._bundle)
