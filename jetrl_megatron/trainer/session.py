"""Everything a run holds: ranks, policy, reference, optimizer, engines, data, rewards, metrics. Built once."""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.config import ModelDims, RunConfig
from jetrl_megatron.config.capacity import EnginePlace, place_engines
from jetrl_megatron.config.checkpoint_files import is_torch_dist, model_folder
from jetrl_megatron.config.plan import resolve_tp_invariant
from jetrl_megatron.fp8 import BLOCK, Fp8Format, Fp8Recipe
from jetrl_megatron.fp8.backends import active_name, use_backend
from jetrl_megatron.megatron.checkpoint import latest_checkpoint, load_checkpoint
from jetrl_megatron.megatron.gather import load_hf, load_megatron
from jetrl_megatron.megatron.groups import Ranks, initialize, own_address
from jetrl_megatron.megatron.linear import LinearPrecision
from jetrl_megatron.megatron.model import Policy, build_policy
from jetrl_megatron.megatron.optimizer import Trainable, make_trainable
from jetrl_megatron.megatron.torch_dist import MegatronCheckpoint
from jetrl_megatron.native.tensors import use_threads
from jetrl_megatron.rl.data import PromptSource
from jetrl_megatron.rl.rewards import Scorer
from jetrl_megatron.rl.warmstart import make_model
from jetrl_megatron.rollout.engine import EngineSpec
from jetrl_megatron.rollout.host_process import HostStarter, StarterAddress
from jetrl_megatron.rollout.sglang_engine import EnginePool
from jetrl_megatron.sync.weight_sync import WeightSync
from jetrl_megatron.trainer import files
from jetrl_megatron.trainer.metrics import MetricsWriter
from jetrl_megatron.weights.io import HfCheckpoint

log = logging.getLogger(__name__)


@dataclass
class Session:
    """Engines, data, scorer and metrics live on global rank 0 and are None elsewhere."""

    cfg: RunConfig
    run_dir: Path
    model_dir: Path
    ranks: Ranks
    policy: Policy
    trainable: Trainable
    reference: Policy | None
    sync: WeightSync
    first_step: int
    stop_token_ids: tuple[int, ...]
    engines: EnginePool | None
    prompts: PromptSource | None
    scorer: Scorer | None
    metrics: MetricsWriter | None
    tokenizer: Any

    def close(self) -> None:
        if self.engines is not None:
            self.engines.shutdown()
        for closable in (self.scorer, self.metrics, self.sync):
            if closable is not None:
                closable.close()


def open_session(cfg: RunConfig, run_dir: Path, resume: bool) -> Session:
    """Build all of it. Files are read and checked (ValueError) before the engines, which are slow, are started."""
    torch.set_num_threads(cfg.trainer.num_threads)
    use_threads(cfg.trainer.num_threads)
    ranks = initialize(cfg.parallel, cfg.trainer.seed)
    places = _engine_places(cfg, ranks)
    backend = use_backend(cfg.precision.backend)
    if ranks.is_main:
        log.info("FP8 backend: %s", backend)
    first = FirstWeights(_model_dir(cfg, run_dir, ranks))
    tokenizer = AutoTokenizer.from_pretrained(str(first.model_dir))
    prompts = PromptSource(cfg.data, tokenizer, cfg.trainer.seed, cfg.eval.path) if ranks.is_main else None
    policy = _policy(cfg, ModelDims.from_hf(first.config), ranks, cfg.trainer.recompute)
    first.load(policy)
    starters = _node_starters(ranks, {place.node for place in places})
    engines = _start_engines(cfg, run_dir, first.config, places, starters) if ranks.is_main else None
    try:
        return _finish(cfg, run_dir, resume, first, tokenizer, prompts, policy, engines)
    except BaseException:
        if engines is not None:
            engines.shutdown()
        raise


def _finish(
    cfg: RunConfig,
    run_dir: Path,
    resume: bool,
    first: FirstWeights,
    tokenizer: Any,
    prompts: PromptSource | None,
    policy: Policy,
    engines: EnginePool | None,
) -> Session:
    """What can be done while the engines start."""
    ranks = policy.ranks
    reference = None
    if cfg.algorithm.kl_coef > 0:
        reference = _policy(cfg, policy.dims, ranks, recompute=False)
        first.load(reference)
    trainable = make_trainable(policy, cfg.optimizer, cfg.trainer.num_steps * cfg.algorithm.updates_per_step)
    first_step, resumed = 1, latest_checkpoint(run_dir / files.CHECKPOINTS) if resume else None
    if resumed is not None:
        state = load_checkpoint(resumed, trainable)
        first_step = state.step + 1
        log.info("resumed from %s (weight version %d)", resumed, state.weight_version)
    done = first_step - 1 if resume else None
    return Session(
        cfg=cfg,
        run_dir=run_dir,
        model_dir=first.model_dir,
        ranks=ranks,
        policy=policy,
        trainable=trainable,
        reference=reference,
        sync=WeightSync(policy, engines, cfg.sync, run_dir, fp8=cfg.precision.rollout == "fp8"),
        first_step=first_step,
        stop_token_ids=cfg.rollout.stop_token_ids or _eos_ids(first.model_dir),
        engines=engines,
        prompts=prompts,
        scorer=Scorer(cfg.reward) if ranks.is_main else None,
        metrics=MetricsWriter(run_dir, cfg.logging, done, cfg.model_dump()) if ranks.is_main else None,
        tokenizer=tokenizer,
    )


class FirstWeights:
    """The weights that a run starts from: a Hugging Face folder or a torch_dist checkpoint of Megatron. model_dir: the
    folder with config.json and tokenizer. Raises ValueError for one that is not whole."""

    def __init__(self, path: Path) -> None:
        self._checkpoint = MegatronCheckpoint(path) if is_torch_dist(path) else HfCheckpoint(path)
        self.model_dir = model_folder(path)
        self.config = self._checkpoint.config

    def load(self, policy: Policy) -> None:
        """Fill this rank's parameters."""
        if isinstance(self._checkpoint, MegatronCheckpoint):
            load_megatron(policy, self._checkpoint)
        else:
            self._checkpoint.verify(policy.plan)
            load_hf(policy, self._checkpoint)


def _model_dir(cfg: RunConfig, run_dir: Path, ranks: Ranks) -> Path:
    """The folder of the first weights; made on rank 0 where the configuration asks for it."""
    if cfg.model.init == "hf":
        return Path(cfg.model.path or "").expanduser()
    folder = run_dir / files.INITIAL_MODEL
    if ranks.is_main:
        # In a process of its own, which gives the memory of the warm start back.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            process.submit(_make_model, cfg, folder).result()
    dist.barrier()
    return folder


def _make_model(cfg: RunConfig, folder: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(cfg.trainer.num_threads)
    make_model(cfg.model, cfg.data, cfg.trainer.seed, folder)


def _policy(cfg: RunConfig, dims: ModelDims, ranks: Ranks, recompute: bool) -> Policy:
    precision = cfg.precision
    recipe = Fp8Recipe(
        format=Fp8Format(precision.granularity, precision.scale_format),
        dgrad=precision.dgrad,
        wgrad=precision.wgrad,
        saved_activation=precision.saved_activation,
    )
    invariant = resolve_tp_invariant(cfg, emulated=active_name() == "emulated")
    linear = LinearPrecision(
        fp8=precision.train == "fp8",
        recipe=recipe,
        tp_invariant=invariant,
        shard_local=precision.misaligned == "shard_local",
    )
    return build_policy(dims, cfg.parallel, ranks, linear, recompute)


def _engine_places(cfg: RunConfig, ranks: Ranks) -> tuple[EnginePlace, ...]:
    """Of every engine; the nodes are alike. Raises ConfigError on every rank where their GPUs do not suffice."""
    gpus = torch.cuda.device_count() if ranks.device.type == "cuda" else 0
    return place_engines(cfg.rollout, ranks.num_nodes, gpus, ranks.world_size // ranks.num_nodes).engines


def _node_starters(ranks: Ranks, nodes: set[int]) -> dict[int, StarterAddress]:
    """Of the nodes that get an engine, apart from rank 0's own. There the first rank starts hosts."""
    if nodes == {0}:
        return {}
    serves = ranks.local_rank == 0 and ranks.node > 0 and ranks.node in nodes
    found: list[tuple[int, StarterAddress] | None] = [None] * ranks.world_size
    dist.all_gather_object(found, (ranks.node, HostStarter(own_address()).address) if serves else None)
    return dict(f for f in found if f is not None)


def _start_engines(
    cfg: RunConfig,
    run_dir: Path,
    hf_config: dict[str, Any],
    places: Sequence[EnginePlace],
    starters: Mapping[int, StarterAddress],
) -> EnginePool:
    """Start all engine processes, where they belong, without waiting for them."""
    rollout = cfg.rollout
    model_dir = run_dir / files.ENGINE_MODEL
    model_dir.mkdir(parents=True, exist_ok=True)
    method = f"jetrl_{cfg.precision.rollout}"
    quantization = {
        "quant_method": method,
        "granularity": cfg.precision.granularity,
        "scale_format": cfg.precision.scale_format,
        "backend": active_name(),
        "tp_invariant": resolve_tp_invariant(cfg, emulated=active_name() == "emulated"),
        "shard_local": cfg.precision.misaligned == "shard_local",
    }
    write_atomic(model_dir / "config.json", json.dumps({**hf_config, "quantization_config": quantization}))
    specs = [
        EngineSpec(
            model_dir=model_dir,
            method=method,
            tensor_parallel=rollout.tensor_parallel,
            expert_parallel=rollout.expert_parallel,
            max_running_requests=rollout.max_running_requests,
            max_total_tokens=rollout.max_total_tokens,
            chunked_prefill_tokens=rollout.chunked_prefill_tokens,
            mem_fraction_static=rollout.mem_fraction_static,
            num_threads=cfg.trainer.num_threads,
            port=rollout.port_base + 100 * i if rollout.port_base else 0,
            log_file=run_dir / files.LOGS / f"engine_{i}.log",
            first_gpu=place.first_gpu,
            cuda_graphs=rollout.cuda_graphs and _decodes_on_the_device(hf_config, rollout.tensor_parallel),
        )
        for i, place in enumerate(places)
    ]
    timeouts = rollout.start_timeout_s, rollout.request_timeout_s
    return EnginePool(specs, *timeouts, rollout.max_restarts, [starters.get(place.node) for place in places])


def _decodes_on_the_device(hf_config: dict[str, Any], num_ranks: int) -> bool:
    """Whether the engines' kernels read nothing on the host in decode. With experts some do: engines of several ranks,
    and DeepGEMM where gate and up rows are not whole blocks (it takes such experts one by one)."""
    inner = int(hf_config.get("moe_intermediate_size", 0))
    if inner and num_ranks > 1:
        return False
    return active_name() == "triton" or (active_name() == "deep_gemm" and inner % BLOCK == 0)


def _eos_ids(model_dir: Path) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config, else of the model config."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    raise ValueError("eos_token_id: missing in generation_config.json and config.json; fix: set rollout.stop_token_ids")
