"""Whole runs of `jetrl train`: what they write, that they are exact where promised, and that they are not elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetrl_megatron.megatron.convert import hf_to_megatron
from jetrl_megatron.weights.convert.layout import Layout
from tests.support.runs import TINY, train, train_ok
from tests.support.trainer import load_policy

pytestmark = pytest.mark.slow
SHORT = (*TINY, "trainer.num_steps=2", "checkpoint.every_steps=0", "model.init=random")
REQUIRED_KEYS = [
    "step",
    "weights/version",
    "reward/mean",
    "reward/std",
    "response/mean_tokens",
    "response/truncated_fraction",
    "mismatch/max_abs_dlogp",
    "mismatch/mean_abs_dlogp",
    "mismatch/kl_k1",
    "mismatch/kl_k3",
    "mismatch/token_mult_prob_error",
    "mismatch/num_tokens",
    "loss/policy",
    "loss/kl",
    "grad/norm",
    "time/rollout_s",
    "time/reward_s",
    "time/logprob_s",
    "time/train_s",
    "time/quantize_s",
    "time/sync_s",
    "time/total_s",
    "tokens/rollout_per_s",
    "tokens/train_per_s",
    "memory/peak_rss_bytes",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with everything on."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    train_ok(
        run_dir,
        *TINY,
        "trainer.num_steps=3",
        "checkpoint.every_steps=2",
        "eval.every_steps=2",
        "eval.num_prompts=8",
        "logging.tensorboard=true",
        "algorithm.kl_coef=0.01",
        "algorithm.updates_per_step=2",
    )
    return run_dir


def test_run_directory_contract(finished: Path) -> None:
    """Every promised file and metric is there, one row per step, and every step is exact."""
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert set(REQUIRED_KEYS) <= set(row)
        assert row["mismatch/max_abs_dlogp"] == 0.0
        assert row["mismatch/num_tokens"] > 50
        assert row["memory/total_pss_bytes"] < 5 * 2**30
    assert [row["weights/version"] for row in rows] == [2, 4, 6]  # two updates per step
    assert "eval/reward_mean" in rows[1]
    for name in (
        "config.resolved.yaml",
        "report.html",
        "hf/config.json",
        "checkpoints/step_000002",
        "logs/engine_0.log",
        "precision_flow/train.json",
        "precision_flow/rollout.json",
        "precision_flow/flow.svg",
    ):
        assert (finished / name).exists(), name
    assert verdict(finished) == (True, [])
    assert list((finished / "tensorboard").iterdir())
    sample = json.loads((finished / "samples" / "step_000001.jsonl").read_text().splitlines()[0])
    assert {"prompt", "response_ids", "text", "reward", "logprobs"} <= set(sample)
    assert len(sample["logprobs"]) == len(sample["response_ids"])
    assert json.loads((finished / "status.json").read_text())["phase"] == "done"


def verdict(run_dir: Path) -> tuple[bool, list[str]]:
    """Of the precision-flow check at start-up: whether rollout is a subgraph, and the differences."""
    found = json.loads((run_dir / "precision_flow" / "verdict.json").read_text())
    return found["subgraph"], found["differences"]


def test_second_run_into_the_folder_is_refused(finished: Path) -> None:
    """Metrics are never mixed: without --resume a used folder is an error that says what to do."""
    done = train(finished, *TINY)
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr


def test_export_is_the_model(finished: Path) -> None:
    """transformers loads hf/ and its fp32 log-probs are ours with BF16 linears within bf16 rounding (0.1 nats at most,
    0.02 on average; activations are bf16 on our side only)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from jetrl_megatron.megatron.step import compute_logprobs, pack

    tokenizer = AutoTokenizer.from_pretrained(str(finished / "hf"))
    assert tokenizer.decode(tokenizer("0123=")["input_ids"]) == "0123="
    model = AutoModelForCausalLM.from_pretrained(str(finished / "hf"), dtype=torch.float32)
    policy = load_policy(finished / "hf", fp8=False)
    ids = torch.randint(3, model.config.vocab_size, (64,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(-1, ids[1:, None]).squeeze(-1)
    difference = (compute_logprobs(policy, [pack([(ids.tolist(), 1)], 1.0, 1)])[0] - expected).abs()
    assert float(difference.max()) < 0.1
    assert float(difference.mean()) < 0.02
    initial, final = (load_file(finished / d / "model.safetensors") for d in ("initial_model", "hf"))
    assert initial.keys() == final.keys()
    assert any(not torch.equal(initial[name], final[name]) for name in final)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("tensor-sequence", ("parallel.tensor=2", "parallel.sequence=true")),
        ("data", ("parallel.data=2",)),
        (
            "virtual-pipeline",
            (
                "parallel.pipeline=2",
                "parallel.virtual_pipeline=2",
                "model.architecture.num_hidden_layers=4",
                "algorithm.updates_per_step=2",
                "trainer.micro_batch_tokens=64",
                "data.max_prompt_tokens=50",
                "trainer.recompute=true",
            ),
        ),
    ],
)
def test_layouts_are_exact(tmp_path: Path, layout: str, overrides: tuple[str, ...]) -> None:
    """Two training ranks in any layout against an engine with TP 1: still exactly 0.0, FP8 backward included."""
    wide = ("model.architecture.head_dim=64", "model.architecture.intermediate_size=512", "precision.dgrad=fp8")
    rows = train_ok(tmp_path / layout, *SHORT, *overrides, *wide, "precision.wgrad=fp8")
    assert [row["mismatch/max_abs_dlogp"] for row in rows] == [0.0, 0.0]
    assert all(row["mismatch/num_tokens"] > 50 and row["grad/norm"] >= 0 for row in rows)
    assert verdict(tmp_path / layout) == (True, [])


def test_shard_local_grids_are_exact(tmp_path: Path) -> None:
    """K of o_proj (128) and down_proj (320) is cut at TP 2 inside a 1x128 group: with per-shard grids on both sides
    still exactly 0.0, after updates too. Without them, or with unequal TP sizes, the run is refused with the rule."""
    cut = (
        "parallel.tensor=2",
        "model.architecture.intermediate_size=320",
        "precision.dgrad=fp8",
        "precision.wgrad=fp8",
    )
    local = (*cut, "precision.misaligned=shard_local", "parallel.tp_invariant=false")
    moving = ("reward.kind=tests.support.runs:even_digits", "optimizer.lr=1e-3", "optimizer.warmup_steps=0")
    rows = train_ok(tmp_path / "run", *SHORT, *local, *moving, "rollout.tensor_parallel=2")
    assert [row["mismatch/max_abs_dlogp"] for row in rows] == [0.0, 0.0]
    assert all(row["mismatch/num_tokens"] > 50 and row["grad/norm"] > 0 for row in rows)
    assert verdict(tmp_path / "run") == (True, [])
    for overrides, rule in (
        (
            (*cut, "rollout.tensor_parallel=2"),
            "mlp.down_proj [128, 320]; rule: K/TP = 320/2 = 160 is a multiple of 128",
        ),
        (local, "one TP size on both sides"),
    ):
        refused = train(tmp_path / "refused", *SHORT, *overrides)
        assert refused.returncode == 2
        assert rule in refused.stderr


def test_bf16_on_both_sides_is_exact(tmp_path: Path) -> None:
    """The operators, not FP8, make it exact: BF16 training against a BF16 engine is 0.0 too."""
    rows = train_ok(tmp_path / "run", *SHORT, "precision.train=bf16", "precision.rollout=bf16")
    assert [row["mismatch/max_abs_dlogp"] for row in rows] == [0.0, 0.0]


def test_unequal_precision_is_not_exact(tmp_path: Path) -> None:
    """Negative control: BF16 training with FP8 rollout shows a mismatch above zero, its precision flow is told at
    start-up, and it is refused when exactness is required or the flow check is not `warn`."""
    mixed = ("precision.train=bf16", "precision.rollout=fp8")
    rows = train_ok(tmp_path / "run", *SHORT, *mixed, "mismatch.correction=tis", "precision.flow_check=warn")
    assert all(row["mismatch/max_abs_dlogp"] > 1e-4 for row in rows)
    subgraph, differences = verdict(tmp_path / "run")
    assert not subgraph
    assert any("mlp.down_proj (layers 0-1): the operator is linear in training" in line for line in differences)
    refused = train(tmp_path / "refused", *SHORT, *mixed)
    assert refused.returncode == 2
    assert "precision.flow_check" in refused.stderr
    refused = train(tmp_path / "refused", *SHORT, *mixed, "mismatch.require_exact=true")
    assert refused.returncode == 2
    assert "mismatch.require_exact" in refused.stderr


def test_engine_log_probs_as_old_policy(finished: Path, tmp_path: Path) -> None:
    """`recompute_old_logprobs: false` saves the forward and still checks exactness, in the update's own forward. The
    run starts from a torch_dist checkpoint, cut for another layout."""
    hf_to_megatron(finished / "hf", tmp_path / "torch_dist", Layout(2)).run()
    first = ("model.init=hf", f"model.path={tmp_path / 'torch_dist'}")
    rows = train_ok(tmp_path / "run", *SHORT, *first, "algorithm.recompute_old_logprobs=false")
    assert [row["mismatch/max_abs_dlogp"] for row in rows] == [0.0, 0.0]
    assert all(row["mismatch/num_tokens"] > 50 for row in rows)


def test_nan_in_weights_is_a_users_error(finished: Path, tmp_path: Path) -> None:
    """A checkpoint with a NaN ends with one line that names the tensor, code 2, before an engine is started."""
    damaged = tmp_path / "damaged"
    shutil.copytree(finished / "hf", damaged)
    tensors = load_file(damaged / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    done = train(tmp_path / "run", *TINY, "model.init=hf", f"model.path={damaged}")
    assert done.returncode == 2, done.stderr
    messages = [line for line in done.stderr.splitlines() if line.startswith("jetrl:")]
    assert len(messages) == 1
    assert name in messages[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "logs" / "engine_0.log").exists()
