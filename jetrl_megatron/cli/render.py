"""The resolved plan as rich tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from jetrl_megatron.config import ModelDims, RunConfig, plan_rows, resolve_tp_invariant
from jetrl_megatron.config.plan import ShardLayout, num_segments

FILE_WIDTH = 150  # characters of a line where the output is no terminal: wide enough for the table


def alignment(layout: ShardLayout, fp8_block: bool) -> str:
    """How one side's shards meet the block grid, in words."""
    if not fp8_block:
        return "bf16 or unblocked"
    if not layout.divides:
        return "does not split"
    if layout.cuts_activation_block:
        return "CUTS activation block"
    if layout.cuts_weight_block:
        return "shared weight amax"
    return "aligned"


def print_plan(cfg: RunConfig, dims: ModelDims, backend: str) -> None:
    """Model, layout and precision in a few lines, then every linear with its block grid and shards."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_WIDTH)
    invariant = resolve_tp_invariant(cfg, backend == "emulated")
    p, par, roll = cfg.precision, cfg.parallel, cfg.rollout
    console.print(
        f"model: {dims.model_type}, {dims.num_layers} layers, hidden {dims.hidden_size}, heads {dims.num_heads}/"
        f"{dims.num_kv_heads} x {dims.head_dim}, vocab {dims.vocab_size}{', tied' if dims.tied_embeddings else ''}"
    )
    if dims.moe is not None:
        moe = dims.moe
        console.print(
            f"experts: {moe.num_experts}, {moe.experts_per_token} per token, inner {moe.intermediate_size}; expert "
            f"parallel: training {par.expert}, engines {roll.expert_parallel}"
        )
    console.print(
        f"precision: train {p.train}, rollout {p.rollout}, {p.granularity}, scales {p.scale_format}, "
        f"dgrad {p.dgrad}, wgrad {p.wgrad}; FP8 backend {backend}; "
        f"exact: {'required' if cfg.require_exact else 'not required'}"
    )
    console.print(
        f"training: tensor {par.tensor}, pipeline {par.pipeline}, data {par.data or 'from the world size'}; engines: "
        f"{roll.num_engines} x tensor {roll.tensor_parallel}; TP-invariant sums: {'yes' if invariant else 'no'}"
    )
    console.print(
        f"step: {cfg.trainer.prompts_per_step} prompts x {roll.samples_per_prompt} samples, "
        f"{cfg.algorithm.updates_per_step} update(s), {cfg.trainer.num_steps} steps"
    )
    table = Table(title="linears of a layer (Hugging Face tensors, blocks of 128 x 128)")
    for column in (
        "tensor",
        "shape",
        "blocks",
        "split",
        "train shard",
        "train blocks",
        "engine shard",
        "engine blocks",
    ):
        table.add_column(column, overflow="fold")
    block = p.granularity == "block"
    for row in plan_rows(cfg, dims):
        lin = row.linear
        split = "column" if lin.kind == "column" else f"row, S={num_segments(lin.k) if invariant else 1}"
        table.add_row(
            lin.name,
            f"{lin.n} x {lin.k}",
            f"{lin.grid[0]} x {lin.grid[1]}",
            split,
            f"{row.train.n} x {row.train.k}",
            alignment(row.train, p.train == "fp8" and block),
            f"{row.engine.n} x {row.engine.k}",
            alignment(row.engine, p.rollout == "fp8" and block),
        )
    console.print(table)
