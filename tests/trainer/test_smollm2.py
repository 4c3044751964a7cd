"""The real checkpoint: SmolLM2-135M-Instruct (hidden 576 = 4.5 blocks, tied embeddings), shipped configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.runs import ROOT, train_ok
from tests.support.trainer import load_policy

ROWS = [
    ("Tom has 3 apples and buys 4 more. How many apples does he have?", "3 + 4 = 7\n#### 7"),
    ("A box holds 6 pens. How many pens are in 5 boxes?", "6 * 5 = 30\n#### 30"),
]


@pytest.mark.slow
def test_two_pipeline_stages_are_exact_and_the_export_is_the_model(smollm2_dir: Path, tmp_path: Path) -> None:
    """configs/smollm2_gsm8k_cpu.yaml on two pipeline stages: mismatch exactly 0.0; transformers loads the export,
    and its fp32 log-probs are ours with BF16 linears within bf16 rounding over 30 layers: 0.1 nats on average, 0.5 at
    most (measured .037 and .12)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from jetrl_megatron.megatron.step import compute_logprobs, pack

    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in ROWS))
    run_dir = tmp_path / "run"
    rows = train_ok(
        run_dir,
        f"model.path={smollm2_dir}",
        f"data.path={data}",
        "parallel.pipeline=2",
        "trainer.num_steps=2",
        "trainer.prompts_per_step=2",
        "rollout.samples_per_prompt=3",
        "rollout.max_new_tokens=24",
        "checkpoint.every_steps=0",
        config=ROOT / "configs" / "smollm2_gsm8k_cpu.yaml",
        timeout_s=900,
    )
    assert [row["mismatch/max_abs_dlogp"] for row in rows] == [0.0, 0.0]
    assert all(row["mismatch/num_tokens"] > 50 for row in rows)

    tokenizer = AutoTokenizer.from_pretrained(str(run_dir / "hf"))
    model = AutoModelForCausalLM.from_pretrained(str(run_dir / "hf"), dtype=torch.float32)
    policy = load_policy(run_dir / "hf", fp8=False)
    ids = tokenizer("The capital of France is Paris, and the sum of two and three is five.")["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
    difference = (compute_logprobs(policy, [pack([(ids, 1)], 1.0, 1)])[0] - expected).abs()
    print(f"|dlogp| against transformers fp32: mean {difference.mean():.4f}, max {difference.max():.4f}")
    assert float(difference.mean()) < 0.1
    assert float(difference.max()) < 0.5
