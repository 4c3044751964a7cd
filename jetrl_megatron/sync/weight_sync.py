"""Sends the weights of a policy to the engines after every update.

The masters are quantized once per version, by the modules that train with the result; the same bytes are gathered,
written as one checksummed bundle into host memory and loaded by every engine. An engine that refuses keeps its old
version whole, and the run ends with a named error.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from jetrl_megatron.config.schema import SyncConfig
from jetrl_megatron.megatron.gather import export_bf16, export_fp8
from jetrl_megatron.megatron.model import Policy
from jetrl_megatron.rollout.engine import EngineDiedError, EngineRefusedError
from jetrl_megatron.rollout.sglang_engine import EnginePool
from jetrl_megatron.weights.bundle import Bundle, write_bundle


class SyncError(RuntimeError):
    """A weight update did not reach the engines."""


@dataclass(frozen=True)
class SyncReport:
    """Times of one update and its size. digest: equal on trainer and engines."""

    version: int
    quantize_s: float
    transfer_s: float
    num_bytes: int
    digest: str


class WeightSync:
    """engines: on global rank 0, None elsewhere. fp8: the engines' linears are FP8."""

    def __init__(self, policy: Policy, engines: EnginePool | None, cfg: SyncConfig, run_dir: Path, fp8: bool) -> None:
        self._policy, self._engines, self._cfg, self._fp8 = policy, engines, cfg, fp8
        name = hashlib.blake2b(str(run_dir.resolve()).encode(), digest_size=8).hexdigest()
        self._staging = Path(cfg.staging_dir) / f"jetrl-{name}"  # the same after a crash, so that leftovers go
        if policy.ranks.is_main:
            shutil.rmtree(self._staging, ignore_errors=True)

    def publish(self, version: int) -> SyncReport:
        """Quantize, gather, transfer. Every rank calls it. Raises SyncError on every rank."""
        self._policy.weights_changed(version)
        start = time.perf_counter()
        if self._fp8:
            for rule, _, module in self._policy.named_rules():
                if rule.quantized:
                    module.fp8_weight()
        quantized = time.perf_counter()
        bundle, error = self._transfer(version)
        outcome = [error]
        dist.broadcast_object_list(outcome, src=0)
        if outcome[0] is not None:
            raise SyncError(outcome[0])
        num_bytes, digest = (bundle.num_bytes, bundle.digest) if bundle else (0, "")
        return SyncReport(version, quantized - start, time.perf_counter() - quantized, num_bytes, digest)

    def _transfer(self, version: int) -> tuple[Bundle | None, str | None]:
        tensors = export_fp8(self._policy) if self._fp8 else export_bf16(self._policy)
        if self._engines is None:
            deque(tensors, maxlen=0)
            return None, None
        try:
            bundle = write_bundle(self._staging / f"version-{version}", version, tensors, self._cfg.bucket_bytes)
            self._engines.load_weights(bundle)
        except (EngineDiedError, EngineRefusedError, OSError) as error:
            deque(tensors, maxlen=0)  # the other ranks are still gathering
            return None, f"weight version {version}: {error}"
        for old in self._staging.iterdir():
            if old != bundle.path:
                shutil.rmtree(old, ignore_errors=True)
        return bundle, None

    def close(self) -> None:
        """Remove the staging folder."""
        if self._policy.ranks.is_main:
            shutil.rmtree(self._staging, ignore_errors=True)
