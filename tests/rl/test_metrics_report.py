"""Metrics files, resume, and the report."""

from __future__ import annotations

import base64
import builtins
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from jetrl_megatron.config.schema import LoggingConfig, RunConfig
from jetrl_megatron.samples import Prompt, Sample
from jetrl_megatron.trainer.metrics import MetricsWriter, decode_row, encode_row, read_metrics
from jetrl_megatron.trainer.report import Summary, sparkline, summarize, write_report

QUIET = LoggingConfig(tensorboard=False)
REPO = Path(__file__).resolve().parents[2]


def row(step: int, **extra: Any) -> dict[str, Any]:
    return {
        "reward/mean": step / 10, "mismatch/max_abs_dlogp": 0.0, "mismatch/num_tokens": 100, "mismatch/num_nonzero": 0,
        "time/rollout_s": 1.0, "time/train_s": 0.5, "time/total_s": 2.0, "tokens/rollout_per_s": 50.0, **extra,
    }  # fmt: skip


def test_nonfinite_numbers_are_strict_json() -> None:
    """NaN and infinities survive a round trip through JSON that any parser reads."""
    line = encode_row(3, {"a": math.nan, "b": -math.inf, "c": 1.5, "d": 2, "e": "x", "f": None})
    strict = json.loads(line, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    assert strict["a"] is None
    assert strict["nonfinite"] == {"a": "nan", "b": "-inf"}
    back = decode_row(line)
    assert math.isnan(back.pop("a"))
    assert back == {"step": 3, "b": -math.inf, "c": 1.5, "d": 2, "e": "x", "f": None}
    for bad in ({"step": 1}, {"a": [1]}):
        with pytest.raises(ValueError, match="rule"):
            encode_row(0, bad)


def test_resume_keeps_steps_up_to_the_checkpoint(tmp_path: Path) -> None:
    """Resuming after step 2 drops rows and samples of later steps and a half-written line, then appends."""
    sample = Sample(Prompt(0, 0, "q", (1,), "a"), 0, [1], [-0.5], "stop", 0, text="ä")
    with MetricsWriter(tmp_path, QUIET) as writer:
        for step in range(5):
            writer.write(step, row(step))
            writer.write_samples(step, [sample] * 20)
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 5, "rew')
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="another run"):
        MetricsWriter(tmp_path, QUIET)
    with MetricsWriter(tmp_path, QUIET, resume_step=2) as writer:
        writer.write(3, row(3, **{"reward/mean": 0.9}))
    rows = read_metrics(tmp_path)
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    assert rows[3]["reward/mean"] == 0.9
    files = sorted((tmp_path / "samples").iterdir())
    assert [f.name for f in files] == [f"step_{i:06d}.jsonl" for i in range(3)]
    records = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len(records) == 16
    assert records[0]["text"] == "ä"
    assert records[0]["logprobs"] == [-0.5]


def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    """The event file holds every numeric metric of every step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, LoggingConfig()) as writer:
        writer.write(0, row(0))
        writer.write(1, row(1, note="text"))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    got = [(e.step, round(e.value, 6)) for e in events.Scalars("reward/mean")]
    assert got == [(0, 0.0), (1, 0.1)]
    assert "note" not in events.Tags()["scalars"]


def test_missing_wandb_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configured sink that is not installed is an error with a fix, and never imported otherwise."""
    real = builtins.__import__

    def without_wandb(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "wandb":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    MetricsWriter(tmp_path / "a", QUIET).close()
    with pytest.raises(ValueError, match="pip install wandb"):
        MetricsWriter(tmp_path / "b", LoggingConfig(tensorboard=False, wandb_project="p"))


def test_report(tmp_path: Path) -> None:
    """The page holds the numbers of the run, four PNG plots and the configuration, and refers to no other address."""
    (tmp_path / "config.resolved.yaml").write_text("name: <demo>\n")
    with MetricsWriter(tmp_path, QUIET) as writer:
        for step in range(12):
            writer.write(step, row(step))
    page = write_report(tmp_path).read_text()
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(images) == 4
    assert all(base64.b64decode(i).startswith(b"\x89PNG") for i in images)
    assert "0.0 (exact)" in page
    assert "1,200 (0 differ)" in page
    assert "24.0 s" in page
    assert "0.200" in page
    assert "0.900" in page
    assert "name: &lt;demo&gt;" in page
    assert "http" not in re.sub(r"base64,[^\"]+", "", page)
    text = summarize(tmp_path)
    assert "▁" in text
    assert "█" in text
    assert "0.00 -> 1.10" in text
    assert "0.0 (exact)" in text
    assert write_report(tmp_path).read_text() == page


@pytest.mark.parametrize(
    ("bad", "expected"), [(math.nan, "nan (NOT exact)"), (1e-7, "1e-07 (NOT exact)"), (math.inf, "inf (NOT exact)")]
)
def test_report_never_hides_a_mismatch(tmp_path: Path, bad: float, expected: str) -> None:
    """One bad step in the middle, or a NaN, shows in the summary of the run and does not break the plots."""
    with MetricsWriter(tmp_path, QUIET) as writer:
        for step in range(3):
            writer.write(step, row(step, **({"mismatch/max_abs_dlogp": bad} if step == 1 else {})))
    assert expected in summarize(tmp_path)
    assert expected in write_report(tmp_path).read_text()


def test_report_of_a_run_without_measurements(tmp_path: Path) -> None:
    """Absent metrics are called not measured; a run without any step is an error."""
    with pytest.raises(ValueError, match="missing"):
        write_report(tmp_path)
    with MetricsWriter(tmp_path, QUIET) as writer:
        writer.write(0, {"loss": 1.0})
    assert "not measured" in summarize(tmp_path)
    assert write_report(tmp_path).read_text().count("not measured in this run") == 4
    assert math.isnan(Summary.of(read_metrics(tmp_path)).max_mismatch)


def test_sparkline() -> None:
    """Eight levels from least to largest, NaN visible, at most 60 bars, flat and empty series."""
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, math.nan, 1.0]) == "▁?█"
    assert sparkline([0.5, 0.5]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(i) for i in range(1000)])) == 60


@pytest.mark.parametrize("name", ["quickstart", "smollm2_gsm8k_cpu"])
def test_configs_load(name: str) -> None:
    """The shipped configurations are valid, exact, and long enough for their longest answer."""
    import yaml

    cfg = RunConfig(**yaml.safe_load((REPO / "configs" / f"{name}.yaml").read_text()))
    assert cfg.require_exact
    assert cfg.precision.dgrad == cfg.precision.wgrad == "bf16"
    if cfg.data.generated:
        assert cfg.rollout.max_new_tokens == cfg.data.max_digits + 1
