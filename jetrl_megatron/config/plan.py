"""How every linear of a layer falls on the 128x128 grid at the training and the engine TP size, and what is refused.

Blocks are counted on the unsharded Hugging Face tensor [N, K] (out, in). A column-parallel shard (q, k, v, gate, up)
cuts rows: a cut weight block is fine, both shards use one amax. A row-parallel shard (o, down) cuts K: a cut there
would also cut a 1x128 activation block, whose amax the ranks do not share, so it is refused. Training never cuts an
expert; an engine cuts all of them, or shares them out (rollout.expert_parallel). Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.errors import Violation
from jetrl_megatron.config.schema import RunConfig

BLOCK = 128
TP_CANDIDATES = (1, 2, 4, 8, 16)
MAX_HEAD_DIM = 128

Side = Literal["train", "engine"]
Kind = Literal["column", "row"]
TP_KEY: dict[Side, str] = {"train": "parallel.tensor", "engine": "rollout.tensor_parallel"}


@dataclass(frozen=True)
class Linear:
    """A linear of one layer, in Hugging Face terms: weight [n, k]; `kind` is its tensor-parallel split. expert: one of
    every expert."""

    name: str
    n: int
    k: int
    kind: Kind
    expert: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, cols) of the weight's block grid; the last block of a row or column may be smaller."""
        return -(-self.n // BLOCK), -(-self.k // BLOCK)


@dataclass(frozen=True)
class ShardLayout:
    """One rank's part [n, k] at `tp`. `divides` is False where the dims do not split; n and k are then unsharded.

    cuts_weight_block: a shard boundary lies inside a weight block (the ranks share its amax).
    cuts_activation_block: it lies inside a 1x128 activation block (refused, or precision.misaligned=shard_local).
    """

    tp: int
    n: int
    k: int
    divides: bool
    cuts_weight_block: bool
    cuts_activation_block: bool


@dataclass(frozen=True)
class PlanRow:
    linear: Linear
    train: ShardLayout
    engine: ShardLayout


def layer_linears(dims: ModelDims) -> tuple[Linear, ...]:
    """The four linears of attention and the three of the MLP or of an expert."""
    hidden, moe = dims.hidden_size, dims.moe
    inter = dims.intermediate_size if moe is None else moe.intermediate_size
    mlp, expert = ("mlp", False) if moe is None else ("mlp.experts", True)
    return (
        Linear("self_attn.q_proj", dims.q_size, hidden, "column"),
        Linear("self_attn.k_proj", dims.kv_size, hidden, "column"),
        Linear("self_attn.v_proj", dims.kv_size, hidden, "column"),
        Linear("self_attn.o_proj", hidden, dims.q_size, "row"),
        Linear(f"{mlp}.gate_proj", inter, hidden, "column", expert),
        Linear(f"{mlp}.up_proj", inter, hidden, "column", expert),
        Linear(f"{mlp}.down_proj", hidden, inter, "row", expert),
    )


def ways(cfg: RunConfig, linear: Linear, side: Side, tp: int) -> int:
    """How many ranks share `linear` at tensor-parallel size `tp`."""
    whole_experts = side == "train" or cfg.rollout.expert_parallel > 1
    return 1 if linear.expert and whole_experts else tp


def shard(linear: Linear, dims: ModelDims, tp: int) -> ShardLayout:
    """Layout of `linear` on `tp` ranks; k and v are replicated where tp is a multiple of the kv heads (engine only)."""
    if linear.kind == "row":
        divides = linear.k % tp == 0
        k = linear.k // tp if divides else linear.k
        cut = tp > 1 and k % BLOCK != 0
        return ShardLayout(tp, linear.n, k, divides, cut, cut)
    ways = tp
    if linear.name.endswith(("k_proj", "v_proj")) and tp > dims.num_kv_heads and tp % dims.num_kv_heads == 0:
        ways = dims.num_kv_heads
    divides = linear.n % ways == 0
    n = linear.n // ways if divides else linear.n
    return ShardLayout(tp, n, linear.k, divides, ways > 1 and n % BLOCK != 0, False)


def plan_rows(cfg: RunConfig, dims: ModelDims) -> list[PlanRow]:
    """One row per linear of a layer: what `jetrl check` prints."""
    train, engine = cfg.parallel.tensor, cfg.rollout.tensor_parallel
    return [
        PlanRow(
            linear,
            shard(linear, dims, ways(cfg, linear, "train", train)),
            shard(linear, dims, ways(cfg, linear, "engine", engine)),
        )
        for linear in layer_linears(dims)
    ]


def num_segments(k: int) -> int:
    """Segments S of a TP-invariant row-parallel sum over K: 4, or 2 or 1 where the K blocks do not divide."""
    num_blocks = -(-k // BLOCK)
    return next(s for s in (4, 2, 1) if num_blocks % s == 0)


def resolve_tp_invariant(cfg: RunConfig, emulated: bool) -> bool:
    """`parallel.tp_invariant`, with its null resolved: true on the emulated backend."""
    return emulated if cfg.parallel.tp_invariant is None else cfg.parallel.tp_invariant


def check_model(cfg: RunConfig, dims: ModelDims, *, emulated: bool = True) -> list[Violation]:
    """Every rule that needs the model's dims; empty where the run can start.

    emulated: FP8 runs without FP8 tensor cores, which decides what `parallel.tp_invariant: null` means.
    """
    invariant = resolve_tp_invariant(cfg, emulated)
    found = [*_model_rules(cfg, dims), *_length_rules(cfg, dims), *_backend_rules(cfg, emulated)]
    sides: tuple[Side, ...] = ("train", "engine")
    for side in sides:
        tp = _tp(cfg, side)
        found += _head_rules(cfg, dims, side, tp)
        found += _fp8_rules(cfg, dims, side, tp, invariant)
    found += _pair_rules(cfg, dims, invariant, emulated)
    return list(dict.fromkeys(found))


def working_tp(cfg: RunConfig, dims: ModelDims, side: Side, invariant: bool) -> list[int]:
    """The TP sizes out of TP_CANDIDATES at which no per-side rule is broken; invariant sums allow no cut shards."""
    if invariant:
        precision = cfg.precision.model_copy(update={"misaligned": "error"})
        cfg = cfg.model_copy(update={"precision": precision})
    return [
        tp
        for tp in TP_CANDIDATES
        if not any(_split_faults(cfg, dims, side, tp)) and not any(_fp8_faults(cfg, dims, side, tp, invariant))
    ]


def _tp(cfg: RunConfig, side: Side) -> int:
    return cfg.parallel.tensor if side == "train" else cfg.rollout.tensor_parallel


def _block_fp8(cfg: RunConfig, side: Side) -> bool:
    precision = cfg.precision.train if side == "train" else cfg.precision.rollout
    return precision == "fp8" and cfg.precision.granularity == "block"


def _sizes(values: list[int]) -> str:
    return ", ".join(str(v) for v in values) if values else "none of 1, 2, 4, 8, 16"


def _backend_rules(cfg: RunConfig, emulated: bool) -> Iterator[Violation]:
    """What the GPU backends do not have."""
    if emulated:
        return
    granularity = cfg.precision.granularity
    if granularity != "block" and "fp8" in (cfg.precision.train, cfg.precision.rollout):
        rule = "the GPU backends of FP8 quantize blocks"
        yield Violation("precision.granularity", granularity, rule, "block, or precision.backend=emulated")
    if cfg.parallel.tp_invariant:
        rule = "the GPU backends add K in one chain"
        yield Violation("parallel.tp_invariant", "true", rule, "false, or precision.backend=emulated")


def _model_rules(cfg: RunConfig, dims: ModelDims) -> Iterator[Violation]:
    if dims.model_type == "qwen2" and dims.head_dim * dims.num_heads != dims.hidden_size:
        own = f"hidden_size / num_attention_heads ({dims.hidden_size} / {dims.num_heads}), as the engine's Qwen2 has it"
        yield Violation("head_dim", str(dims.head_dim), own, "another number of heads")
    if dims.head_dim > MAX_HEAD_DIM or dims.head_dim % 2:
        yield Violation(
            "head_dim", str(dims.head_dim), f"even and at most {MAX_HEAD_DIM}", "use a model that the attention covers"
        )
    pipeline = cfg.parallel.pipeline
    if dims.num_layers % pipeline:
        divisors = [d for d in range(1, dims.num_layers + 1) if dims.num_layers % d == 0]
        yield Violation(
            "parallel.pipeline", str(pipeline), f"divides num_layers ({dims.num_layers})", f"use one of {divisors}"
        )
    elif dims.num_layers // pipeline % cfg.parallel.virtual_pipeline:
        per_stage = dims.num_layers // pipeline
        divisors = [d for d in range(1, per_stage + 1) if per_stage % d == 0]
        yield Violation(
            "parallel.virtual_pipeline",
            str(cfg.parallel.virtual_pipeline),
            f"divides the layers of a pipeline stage ({dims.num_layers} / {pipeline} = {per_stage})",
            f"use one of {divisors}",
        )
    yield from _expert_rules(cfg, dims)
    if cfg.parallel.sequence and dims.hidden_size % cfg.parallel.tensor:
        yield Violation(
            "parallel.sequence",
            "true",
            f"hidden_size ({dims.hidden_size}) divides by parallel.tensor ({cfg.parallel.tensor})",
            "set parallel.sequence=false or another parallel.tensor",
        )


def _expert_rules(cfg: RunConfig, dims: ModelDims) -> Iterator[Violation]:
    for key, size in (
        ("parallel.expert", cfg.parallel.expert),
        ("rollout.expert_parallel", cfg.rollout.expert_parallel),
    ):
        if size > 1 and dims.moe is None:
            yield Violation(key, str(size), f"1 for a dense model ({dims.model_type} has no experts)", f"set {key}=1")
        elif dims.moe is not None and dims.moe.num_experts % size:
            num_experts = dims.moe.num_experts
            divisors = [d for d in range(1, num_experts + 1) if num_experts % d == 0]
            yield Violation(key, str(size), f"divides num_experts ({num_experts})", f"use one of {divisors}")
    if dims.moe is None:
        return
    if cfg.parallel.tensor > 1 and not cfg.parallel.sequence:
        yield Violation(
            "parallel.sequence",
            "false",
            f"true with experts and parallel.tensor={cfg.parallel.tensor}: ranks route different tokens",
            "set parallel.sequence=true",
        )
    tp = cfg.rollout.tensor_parallel
    if cfg.rollout.expert_parallel not in (1, tp):
        yield Violation(
            "rollout.expert_parallel",
            str(cfg.rollout.expert_parallel),
            f"1 or rollout.tensor_parallel ({tp}): SGLang shares experts over all ranks of an engine",
            f"set it to 1 or {tp}",
        )


def _length_rules(cfg: RunConfig, dims: ModelDims) -> Iterator[Violation]:
    prompt, new = cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens
    longest = prompt + new
    what = f"data.max_prompt_tokens ({prompt}) + rollout.max_new_tokens ({new}) = {longest}"
    if cfg.rollout.max_total_tokens < longest:
        yield Violation(
            "rollout.max_total_tokens",
            str(cfg.rollout.max_total_tokens),
            f"the KV cache holds one sequence: at least {what}",
            f"set it to {longest} or more",
        )
    if cfg.trainer.micro_batch_tokens < longest:
        yield Violation(
            "trainer.micro_batch_tokens",
            str(cfg.trainer.micro_batch_tokens),
            f"a micro-batch holds one sequence: at least {what}",
            f"set it to {longest} or more",
        )
    if not cfg.data.generated and longest > dims.max_position_embeddings:
        yield Violation(
            "rollout.max_new_tokens",
            str(new),
            f"{what} fits the model's max_position_embeddings ({dims.max_position_embeddings})",
            "lower rollout.max_new_tokens or data.max_prompt_tokens",
        )


def _split_faults(cfg: RunConfig, dims: ModelDims, side: Side, tp: int) -> Iterator[tuple[str, str]]:
    """(what does not split, rule) at `tp`."""
    if dims.num_heads % tp:
        yield f"num_attention_heads={dims.num_heads}", f"{TP_KEY[side]} divides num_attention_heads"
    kv_heads = dims.num_kv_heads
    if side == "train" and kv_heads % tp:
        yield f"num_key_value_heads={kv_heads}", f"{TP_KEY[side]} divides num_key_value_heads"
    if side == "engine" and kv_heads % tp and tp % kv_heads:
        yield f"num_key_value_heads={kv_heads}", f"{TP_KEY[side]} divides num_key_value_heads or is a multiple of it"
    down = layer_linears(dims)[-1]
    if down.k % ways(cfg, down, side, tp):
        inner = "moe_intermediate_size" if down.expert else "intermediate_size"
        yield f"{inner}={down.k}", f"{TP_KEY[side]} divides {inner}"


def _head_rules(cfg: RunConfig, dims: ModelDims, side: Side, tp: int) -> Iterator[Violation]:
    working = [t for t in TP_CANDIDATES if not any(_split_faults(cfg, dims, side, t))]
    for what, rule in _split_faults(cfg, dims, side, tp):
        yield Violation(TP_KEY[side], f"{tp} with {what}", rule, f"TP sizes that split this model: {_sizes(working)}")


def _fp8_faults(
    cfg: RunConfig, dims: ModelDims, side: Side, tp: int, invariant: bool
) -> Iterator[tuple[Linear, Literal["cut", "segments"]]]:
    """Row-parallel linears whose FP8 blocks or whose summation segments do not fall on `tp` shards."""
    if not _block_fp8(cfg, side):
        return
    for linear in layer_linears(dims):
        shares = ways(cfg, linear, side, tp)
        if linear.kind == "column" or linear.k % shares:
            continue  # a K that does not split is told by _split_faults
        if shard(linear, dims, shares).cuts_activation_block:
            if cfg.precision.misaligned == "error" or linear.expert:  # training never cuts an expert
                yield linear, "cut"
        elif invariant and num_segments(linear.k) % shares:
            yield linear, "segments"


def _fp8_rules(cfg: RunConfig, dims: ModelDims, side: Side, tp: int, invariant: bool) -> Iterator[Violation]:
    precision = cfg.precision.train if side == "train" else cfg.precision.rollout
    if precision == "fp8" and cfg.precision.granularity != "block" and tp > 1:
        yield Violation(
            TP_KEY[side],
            str(tp),
            f"precision.granularity={cfg.precision.granularity} works at TP 1 only (its scales span the shards)",
            f"set {TP_KEY[side]}=1 or precision.granularity=block",
        )
    sizes = _sizes(working_tp(cfg, dims, side, invariant))
    for linear, fault in _fp8_faults(cfg, dims, side, tp, invariant):
        value = f"{tp} with {linear.name} [{linear.n}, {linear.k}]"
        if fault == "cut":
            other = "precision.misaligned=shard_local with equal TP on both sides"
            if linear.expert:
                other = f"rollout.expert_parallel={tp}"
            fix = f"TP sizes that work: {sizes}; or {other}"
            rule = (
                f"K/TP = {linear.k}/{tp} = {linear.k // tp} is a multiple of {BLOCK}, else it cuts an activation block"
            )
        else:
            segments = num_segments(linear.k)
            blocks = linear.grid[1]
            rule = f"tp_invariant sums K = {blocks} blocks in {segments} segments, and TP divides the segments"
            fix = f"TP sizes that work: {sizes}; or parallel.tp_invariant=false with equal TP on both sides"
        yield Violation(TP_KEY[side], value, rule, fix)


def _pair_rules(cfg: RunConfig, dims: ModelDims, invariant: bool, emulated: bool) -> Iterator[Violation]:
    """Rules between the training and the engine TP size."""
    train, engine = cfg.parallel.tensor, cfg.rollout.tensor_parallel
    sides: tuple[Side, ...] = ("train", "engine")
    cut = [
        linear.name
        for linear in layer_linears(dims)
        if any(
            _block_fp8(cfg, s) and shard(linear, dims, ways(cfg, linear, s, _tp(cfg, s))).cuts_activation_block
            for s in sides
        )
    ]
    unequal = f"{train} with rollout.tensor_parallel={engine}"
    if cfg.precision.misaligned == "shard_local" and cut:
        if train != engine:
            yield Violation(
                "parallel.tensor",
                unequal,
                f"precision.misaligned=shard_local quantizes {', '.join(cut)} per shard: one TP size on both sides",
                "make them equal",
            )
        if invariant:
            yield Violation(
                "precision.misaligned",
                "shard_local",
                f"blocks of {', '.join(cut)} depend on TP, so sums cannot be TP-invariant",
                "set parallel.tp_invariant=false",
            )
    elif train != engine and cfg.require_exact and not invariant:
        yield Violation(
            "parallel.tensor",
            unequal,
            "mismatch.require_exact with parallel.tp_invariant=false sums in rank order: one TP size on both sides",
            "make them equal, or set parallel.tp_invariant=true, or mismatch.require_exact=false",
        )
    cut_experts = any(linear.expert and ways(cfg, linear, "engine", engine) > 1 for linear in layer_linears(dims))
    rounds = _block_fp8(cfg, "engine") or not emulated  # BF16 sums of the emulated backend are exact
    if cut_experts and cfg.require_exact and not invariant and rounds:
        yield Violation(
            "rollout.expert_parallel",
            f"1 with rollout.tensor_parallel={engine}",
            "mismatch.require_exact with parallel.tp_invariant=false: training never cuts experts, nor may an engine",
            f"set rollout.expert_parallel={engine}, or parallel.tp_invariant=true",
        )
