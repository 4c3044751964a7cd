"""`jetrl plan`: memory per GPU, block alignment and expected times of a configuration, before any GPU is rented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jetrl_megatron.cli.errors import user_errors
from jetrl_megatron.config import ConfigError, ModelDims, RunConfig, Violation, load_config, read_dims
from jetrl_megatron.config.capacity import H100, CapacityPlan, Layout, Lengths, make_plan
from jetrl_megatron.config.capacity.hardware import GIB
from jetrl_megatron.config.preflight import check_flow_precision


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML run configuration")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PART.yaml | KEY=VALUE]...", help="parts (model, recipe, precision, layout), overrides"
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs; default: one per training rank")] = None,
    gpu_memory_gib: Annotated[float, typer.Option("--gpu-memory-gib", min=1.0, help="memory of one GPU")] = 80.0,
    prompt_tokens: Annotated[int | None, typer.Option("--prompt-tokens", min=1, help="mean prompt")] = None,
    response_tokens: Annotated[int | None, typer.Option("--response-tokens", min=1, help="mean response")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Memory per GPU and estimated step time on H100s; exit 0 if it fits, 1 if not, 2 for a wrong configuration."""
    with user_errors():
        cfg = load_config(config, overrides or [])
        faults = check_flow_precision(cfg)
        if faults:
            raise ConfigError(faults)
        dims = plan_dims(cfg)
        lengths = Lengths(prompt_tokens or cfg.data.max_prompt_tokens, response_tokens or cfg.rollout.max_new_tokens)
        found = make_plan(cfg, dims, gpus, gpu_memory_gib, lengths)
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else "\n".join(lines(cfg, found)))
    raise typer.Exit(0 if found.fits else 1)


def plan_dims(cfg: RunConfig) -> ModelDims:
    """As `read_dims`, but from model.architecture where the checkpoint is not on this machine. Raises ConfigError."""
    absent = cfg.model.init == "hf" and not Path(cfg.model.path or "").expanduser().is_dir()
    if not absent:
        return read_dims(cfg)
    if not cfg.model.architecture:
        rule = "an existing checkpoint, or model.architecture beside it"
        fix = "add configs/models/NAME.yaml after the configuration"
        raise ConfigError([Violation("model.path", str(cfg.model.path), rule, fix)])
    try:
        return ModelDims.from_hf(cfg.model.architecture)
    except ValueError as error:
        raise ConfigError([f"model.architecture: {error}"]) from None


def lines(cfg: RunConfig, found: CapacityPlan) -> list[str]:
    """The plan as plain text."""
    layout, limit = found.layout, found.limit_bytes
    own = "one rank on each training GPU" if layout.shared else "on their own GPUs"
    out = [
        f"{layout.gpus} GPUs: training tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}, "
        f"expert {layout.expert}; engines {layout.num_engines} x tensor {layout.engine_tensor}, {own}",
        f"engine i on node i mod {layout.nodes}; node 0: {_first_node(layout)}",
        "block alignment: TP sizes that work: training "
        f"{found.working_tp['train'] or 'none'}, engines {found.working_tp['engine'] or 'none'}",
        f"tokens of a step: {found.time.step_tokens} ({found.lengths.prompt} + {found.lengths.response} per sequence "
        f"assumed); in flight per engine: {found.time.decode_batch} sequences, {found.time.decode_rounds} round(s)",
    ]
    for memory in found.memories:
        verdict = "fits" if memory.total_bytes <= limit else "DOES NOT FIT"
        out.append(f"memory of a GPU, {memory.role}: {_gib(memory.total_bytes)} of {_gib(limit)} usable: {verdict}")
        out += [f"  {part:<24}{_gib(size):>12}" for part, size in memory.resident.items() if size]
        for phase, parts in memory.peaks.items():
            mark = "peak" if phase == memory.peak_phase else "not at the peak"
            out += [f"  {part:<24}{_gib(size):>12}  ({phase}, {mark})" for part, size in parts.items() if size]
    run, bf16 = (sum(found.saved_bytes_per_token[key].values()) for key in ("run", "bf16"))
    out.append(f"activations kept per token and layer: {run:.0f} bytes, in bf16 {bf16:.0f} ({1 - run / bf16:.1%} less)")
    out.append(
        f"a weight version as sent: {_gib(found.bundle_bytes)} through {cfg.sync.staging_dir} (twice at a change)"
    )
    out.append(f"ESTIMATED step on {H100.name}, not measured: {found.time.total_s:.1f} s")
    out += [f"  {phase:<24}{seconds:>10.2f} s" for phase, seconds in found.time.phases_s.items()]
    out += [f"refused: {violation}" for violation in found.violations]
    if found.fits:
        return [*out, "verdict: fits"]
    if found.nearest is None:
        return [*out, "verdict: does not fit; no layout of this model was found that does"]
    gpus, overrides = found.nearest
    return [*out, f"verdict: does not fit; nearest that does: --gpus {gpus} {' '.join(overrides)}"]


def _first_node(layout: Layout) -> str:
    """Engines and GPUs of one node; the others are alike."""
    size = layout.engine_tensor
    places = [(i, p.first_gpu) for i, p in enumerate(layout.placement.engines) if p.node == 0]
    return ", ".join(f"engine {i} GPUs {gpu}-{gpu + size - 1}" for i, gpu in places if gpu is not None)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
