"""`jetrl convert ...`: checkpoints between Hugging Face and Megatron, BF16 and FP8, and between layouts.

Exit codes: 0 done, 1 two checkpoints differ (verify), 2 bad input. `tools/convert/*.py` run the same commands.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from jetrl_megatron.cli.errors import user_errors

if TYPE_CHECKING:
    from jetrl_megatron.weights.convert.job import Job

POLL_S = 0.2
DIFFERS = 1

app = typer.Typer(
    name="convert",
    help="Convert, reshard, inspect and compare checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class ScaleFormatOption(StrEnum):
    fp32 = "fp32"
    pow2 = "pow2"


class DtypeOption(StrEnum):
    bf16 = "bf16"
    fp32 = "fp32"
    fp8 = "fp8"


HfOption = Annotated[Path, typer.Option("--hf", help="Hugging Face folder to read")]
OutOption = Annotated[Path, typer.Option("--out", help="folder to make; must not exist")]
MegatronOption = Annotated[Path, typer.Option("--megatron", help="Megatron checkpoint to read")]
HfConfigOption = Annotated[
    Path | None, typer.Option("--hf-config", help="folder with config.json and tokenizer; default: MEGATRON/hf")
]
TensorOption = Annotated[int, typer.Option("--tp", help="tensor-parallel size")]
PipelineOption = Annotated[int, typer.Option("--pp", help="pipeline-parallel size")]
ExpertOption = Annotated[int, typer.Option("--ep", help="expert-parallel size")]
WorkersOption = Annotated[int, typer.Option("--workers", help="processes; each makes a file at a time")]


def script(command: Callable[..., None]) -> None:
    """Run one command as a program of its own (tools/convert/*.py)."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(help=command.__doc__)(command)
    alone()


@contextlib.contextmanager
def _progress(job: Job) -> Iterator[None]:
    """A bar with GB/s and the time that is left, on stderr; it watches the files grow."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task, finished = bar.add_task(job.out.name, total=job.num_bytes), threading.Event()

        def watch() -> None:
            while not finished.wait(POLL_S):
                bar.update(task, completed=_size(job.staging))

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
            bar.update(task, completed=job.num_bytes)
        finally:
            finished.set()
            thread.join()


def _size(folder: Path) -> int:
    """Bytes of the files of a folder that others write to."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for file in folder.iterdir():
            total += file.stat().st_size
    return total


def _is_shards(folder: Path) -> bool:
    from jetrl_megatron.weights.convert.ranks import LAYOUT_FILE

    return (folder / LAYOUT_FILE).is_file()


def _run(job: Job, workers: int) -> None:
    with _progress(job):
        job.run(workers)
    typer.echo(f"wrote {job.out} ({job.num_bytes / 1e9:.2f} GB)")


@app.command("bf16-to-fp8")
def bf16_to_fp8(
    hf: HfOption,
    out: OutOption,
    scale_format: Annotated[
        ScaleFormatOption, typer.Option("--scale-format", help="scales: amax / 448, or the power of two not below")
    ] = ScaleFormatOption.fp32,
    workers: WorkersOption = 1,
) -> None:
    """Quantize the linears of a Hugging Face checkpoint to FP8 in blocks of 128 x 128.

    Example: bf16_to_fp8.py --hf Qwen3-8B --out Qwen3-8B-FP8 --workers 4
    """
    from jetrl_megatron.weights.convert import precision

    with user_errors(ValueError):
        _run(precision.bf16_to_fp8(hf, out, scale_format.value, workers), workers)


@app.command("fp8-to-bf16")
def fp8_to_bf16(hf: HfOption, out: OutOption, workers: WorkersOption = 1) -> None:
    """Dequantize a block-FP8 Hugging Face checkpoint to BF16.

    Example: fp8_to_bf16.py --hf Qwen3-8B-FP8 --out Qwen3-8B
    """
    from jetrl_megatron.weights.convert import precision

    with user_errors(ValueError):
        _run(precision.fp8_to_bf16(hf, out, workers), workers)


@app.command("hf-to-megatron")
def hf_to_megatron(
    hf: HfOption,
    out: OutOption,
    tp: TensorOption = 1,
    pp: PipelineOption = 1,
    ep: ExpertOption = 1,
    dtype: Annotated[
        DtypeOption, typer.Option("--dtype", help="bf16, fp32: torch_dist; fp8: one safetensors file per rank")
    ] = DtypeOption.bf16,
    workers: WorkersOption = 1,
) -> None:
    """Convert a Hugging Face checkpoint to Megatron: torch_dist, or FP8 shards per rank.

    Example: hf_to_megatron.py --hf Qwen3-8B --out Qwen3-8B-mcore --tp 2
    """
    from jetrl_megatron.megatron import convert as megatron
    from jetrl_megatron.weights.convert import ranks
    from jetrl_megatron.weights.convert.layout import Layout

    with user_errors(ValueError):
        layout = Layout(tp, pp, ep)
        if dtype is DtypeOption.fp8:
            _run(ranks.hf_to_shards(hf, out, layout), workers)
        else:
            _run(megatron.hf_to_megatron(hf, out, layout, dtype is DtypeOption.fp32), workers)


@app.command("megatron-to-hf")
def megatron_to_hf(
    megatron: MegatronOption,
    out: OutOption,
    hf_config: HfConfigOption = None,
    workers: WorkersOption = 1,
) -> None:
    """Convert a Megatron checkpoint (torch_dist, a trainer's too, or FP8 shards) to a Hugging Face folder.

    Example: megatron_to_hf.py --megatron runs/a/checkpoints/step_000100 --out a-hf --hf-config Qwen3-8B
    """
    from jetrl_megatron.megatron import convert
    from jetrl_megatron.weights.convert import ranks

    with user_errors(ValueError):
        if _is_shards(megatron):
            _run(ranks.shards_to_hf(megatron, out, hf_config, workers), workers)
        else:
            _run(convert.megatron_to_hf(megatron, out, hf_config, workers), workers)


@app.command()
def reshard(
    megatron: MegatronOption,
    out: OutOption,
    tp: TensorOption = 1,
    pp: PipelineOption = 1,
    ep: ExpertOption = 1,
    hf_config: HfConfigOption = None,
    workers: WorkersOption = 1,
) -> None:
    """Cut a Megatron checkpoint (torch_dist or FP8 shards) for other parallel sizes; no value changes.

    Example: reshard.py --megatron Qwen3-8B-tp2 --out Qwen3-8B-tp4 --tp 4 --pp 1 --ep 1
    """
    from jetrl_megatron.megatron import convert
    from jetrl_megatron.weights.convert import ranks
    from jetrl_megatron.weights.convert.layout import Layout

    with user_errors(ValueError):
        layout = Layout(tp, pp, ep)
        if _is_shards(megatron):
            _run(ranks.reshard_shards(megatron, out, layout, hf_config), workers)
        else:
            _run(convert.reshard(megatron, out, layout, hf_config), workers)


@app.command("inspect")
def inspect_checkpoint(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="checkpoint of any format")],
    tp: Annotated[str, typer.Option("--tp", help="tensor-parallel sizes to look at")] = "1,2,4,8",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    hf_config: HfConfigOption = None,
) -> None:
    """Tell what a checkpoint is: family, dims, precision, block grid, layout per TP size and what would be cut.

    Example: inspect_checkpoint.py Qwen3-4B --tp 1,2,4,8
    """
    from jetrl_megatron.cli.checkpoints import open_checkpoint
    from jetrl_megatron.weights.convert import inspect

    with user_errors(ValueError):
        if not all(size.strip().isdigit() and int(size) for size in tp.split(",")):
            raise ValueError(f"tp: {tp!r}; rule: positive integers with commas; fix: e.g. 1,2,4,8")
        opened = open_checkpoint(path, hf_config)
        sizes = [int(size) for size in tp.split(",")]
        found = inspect.describe(opened.kind, opened.dims, opened.dtypes, opened.num_bytes, sizes)
        typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(inspect.lines(found)))


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="checkpoint of any format")],
    b: Annotated[Path, typer.Argument(metavar="B", help="checkpoint of any format")],
    logits: Annotated[bool, typer.Option("--logits", help="also compare logits (both models in fp32)")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    hf_config: HfConfigOption = None,
) -> None:
    """Compare two checkpoints tensor by tensor: bits where the precision is the same, else values. Exit 1: they differ.

    Example: verify.py Qwen3-8B Qwen3-8B-mcore --logits
    """
    from jetrl_megatron.cli.checkpoints import open_checkpoint
    from jetrl_megatron.weights.convert import compare

    with user_errors(ValueError):
        left, right = (open_checkpoint(path, hf_config) for path in (a, b))
        found = list(compare.differences(left.tensors, right.tensors))
        shown = compare.compare_logits(left.tensors, right.tensors, left.config) if logits else None
        report = compare.report(found, len(left.dtypes), shown)
        typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(compare.lines(report)))
    if found:
        raise typer.Exit(DIFFERS)
