"""Tasks, tokenizer, prompt order and the warm start."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetrl_megatron.config.schema import DataConfig, ModelConfig, WarmstartConfig
from jetrl_megatron.rl import tasks
from jetrl_megatron.rl.data import PromptSource, response_text
from jetrl_megatron.rl.warmstart import demonstrations, learning_rate, make_model, train

CHAIN = DataConfig(task="chain")
TINY = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_answers_by_hand() -> None:
    """Running sums mod 10; sorted digits; 127 + 95 = 222 and 99 + 1 = 100, least significant digit first."""
    chain, sort, arithmetic = (tasks.get_task(name) for name in ("chain", "sort", "arithmetic"))
    assert chain.answer("19503") == "10558"
    assert chain.prompt("19503", 24) == "19503" + " " * 19 + "="
    assert sort.answer("30512") == "01235"
    assert [arithmetic.answer(p) for p in ("127+95", "99+1", "0+0")] == ["222", "001", "0"]


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_demonstrator(name: str) -> None:
    """Without error it is right; with error .06 it is right about as often as no step slips."""
    task = tasks.get_task(name)
    right = 0
    for row in range(400):
        problem = tasks.problem(task, "warmstart", 0, row, 12, 24)
        assert task.demonstration(problem, random.Random(row), 0.0) == task.answer(problem)
        right += task.demonstration(problem, random.Random(row), 0.06) == task.answer(problem)
    assert 0.2 < right / 400 < 0.6


def test_held_out_problems_are_never_trained_on() -> None:
    """Even where only 100 problems exist, evaluation shares none with training or warm start."""
    task = tasks.get_task("chain")
    drawn = {
        split: {tasks.problem(task, split, seed, row, 2, 2) for seed in (0, 1) for row in range(300)}
        for split in ("train", "eval", "warmstart")
    }
    assert drawn["eval"]
    assert not drawn["eval"] & (drawn["train"] | drawn["warmstart"])


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    """Decoding gives back exactly the characters, one token each, also after saving and loading as a Qwen3 folder, and
    every id below vocab_size decodes to something."""
    built = tasks.build_char_tokenizer(64)
    built.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    for tokenizer in (built, AutoTokenizer.from_pretrained(tmp_path)):
        for text in ("0123456789", "12                      =", "1+2=3", " ", "  7 "):
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(text)
            assert tokenizer.decode(ids) == text
        assert len(tokenizer) == 64
        assert all(tokenizer.decode([i]) for i in range(64))
        assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<eos>"
        assert response_text(tokenizer, [2, 3, 1], [1]) == "01"
        assert response_text(tokenizer, [2, 0, 3, 1], [1]) == "0<pad>1"
    with pytest.raises(ValueError, match="at least"):
        tasks.build_char_tokenizer(10)


@pytest.mark.parametrize("shuffle", [True, False])
def test_order_is_a_function_of_seed_and_step(tmp_path: Path, shuffle: bool) -> None:
    """Asking for step 5 first gives what a run from 0 gets; an epoch holds every row once; epochs and seeds differ."""
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(10)))
    cfg = DataConfig(path=str(path), chat_template=False, shuffle=shuffle)
    tokenizer = tasks.build_char_tokenizer(64)
    source = PromptSource(cfg, tokenizer, seed=0)
    rows = [p.row for step in range(10) for p in source.prompts_for_step(step, 4)]
    assert [sorted(rows[i : i + 10]) for i in (0, 10, 20, 30)] == [list(range(10))] * 4
    assert (rows[:10] != rows[10:20]) == shuffle
    fresh = PromptSource(cfg, tokenizer, seed=0)
    assert fresh.prompts_for_step(5, 4) == source.prompts_for_step(5, 4)
    assert [p.row for p in fresh.prompts_for_step(5, 4)] == rows[20:24]
    other = PromptSource(cfg, tokenizer, seed=1)
    assert (rows[:10] != [p.row for s in range(3) for p in other.prompts_for_step(s, 4)][:10]) == shuffle
    prompt = source.prompts_for_step(0, 4)[2]
    assert prompt.index == 2
    assert tokenizer.decode(prompt.token_ids) == prompt.text == f"{prompt.row}+1="


def test_generated_prompts() -> None:
    """Generated steps repeat exactly, differ from each other, and their answers are right."""
    source = PromptSource(CHAIN, tasks.build_char_tokenizer(64), seed=0)
    step = source.prompts_for_step(7, 16)
    assert step == source.prompts_for_step(7, 16)
    texts = {p.text for s in range(8) for p in source.prompts_for_step(s, 16)}
    assert len(texts) == 128
    assert not texts & {p.text for p in source.eval_prompts(64)}
    for p in step:
        total = 0
        assert len(p.text) == 25
        assert 12 <= len(p.answer) <= 24
        for digit, got in zip(p.text.split("=")[0].strip(), p.answer, strict=True):
            total += int(digit)
            assert int(got) == total % 10


@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        ('{"question": "1"}', {}, r"d\.jsonl:3: no column 'answer'.*data\.answer_field"),
        ('{"question": "1", "answer": ["x"]}', {}, r"d\.jsonl:3: answer: list"),
        ('{"question": ', {}, r"d\.jsonl:3: "),
        ("[1]", {}, r"d\.jsonl:3: list"),
        ('{"question": "123456", "answer": "1"}', {"max_prompt_tokens": 5}, r"d\.jsonl:3: question: 6 tokens.*= 5"),
        ('{"question": "", "answer": "1"}', {}, r"d\.jsonl:3: question: 0 tokens"),
        ('{"question": "1", "answer": "1"}', {"chat_template": True}, r"data\.chat_template=false"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: str, changes: dict[str, Any], message: str) -> None:
    """A bad row fails when the source is made, with file, line, key, rule and fix."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "1", "answer": 1}\n\n' + line + "\n")
    cfg = DataConfig(**{"path": str(path), "chat_template": False, **changes})
    with pytest.raises(ValueError, match=message):
        PromptSource(cfg, tasks.build_char_tokenizer(64), seed=0)


def test_hf_folder_chat_template_and_eval_file(tmp_path: Path) -> None:
    """A save_to_disk folder with splits; the chat template renders system, template and generation prompt; evaluation
    rows come from eval.path, and without it the error names the key."""
    import datasets

    rows = datasets.Dataset.from_dict({"q": ["1", "2"], "a": [1, 2]})
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "ds"))
    tokenizer = tasks.build_char_tokenizer(110)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}>"
    cfg = DataConfig(task="hf", path=str(tmp_path / "ds"), prompt_field="q", answer_field="a", system_prompt="s",
                     prompt_template="<{prompt}>", shuffle=False)  # fmt: skip
    source = PromptSource(cfg, tokenizer, seed=0)
    first = source.prompts_for_step(0, 1)[0]
    assert first.text == "[system:s][user:<1>]>" == tokenizer.decode(first.token_ids)
    assert first.answer == "1"
    with pytest.raises(ValueError, match=r"eval\.path"):
        source.eval_prompts(1)
    (tmp_path / "e.jsonl").write_text('{"q": "9", "a": "#### 9"}\n')
    held_out = PromptSource(cfg, tokenizer, seed=0, eval_path=tmp_path / "e.jsonl").eval_prompts(5)
    assert [p.answer for p in held_out] == ["#### 9"]
    with pytest.raises(ValueError, match=r"data\.split"):
        PromptSource(cfg.model_copy(update={"split": "test"}), tokenizer, seed=0)


def test_demonstration_labels() -> None:
    """Labels cover exactly response and EOS; padding and prompt are ignored."""
    tokenizer = tasks.build_char_tokenizer(64)
    ids, labels = demonstrations(tokenizer, WarmstartConfig(batch_size=4), CHAIN, 0, 0)
    for row_ids, row_labels in zip(ids.tolist(), labels.tolist(), strict=True):
        end = row_ids.index(tokenizer.eos_token_id)
        assert row_labels == [-100] * 25 + row_ids[25 : end + 1] + [-100] * (len(row_ids) - end - 1)
        assert 12 <= end - 25 <= 24


def test_learning_rate() -> None:
    """Step 0 is lr/20, the peak comes at step 19 and 20, the last step is a tenth."""
    cfg = WarmstartConfig(lr=1.0, num_steps=110)
    got = [learning_rate(step, cfg) for step in (0, 19, 20, 109)]
    assert got == pytest.approx([0.05, 1.0, 1.0, 0.1])


def test_make_model(tmp_path: Path) -> None:
    """The folder is bf16, loads with AutoModel and AutoTokenizer, ends at <eos>, is bitwise the same for a seed and
    another for another; the caller's random state is untouched; an existing folder of other settings is refused."""
    cfg = ModelConfig(init="warmstart", architecture=TINY, warmstart=WarmstartConfig(num_steps=3, batch_size=4))
    state = torch.get_rng_state()
    a, b, c = (make_model(cfg, CHAIN, seed, tmp_path / name) for seed, name in ((0, "a"), (0, "b"), (1, "c")))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (a, b, c)]
    assert weights[0] == weights[1] != weights[2]
    model = AutoModelForCausalLM.from_pretrained(a, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(a)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.vocab_size == len(tokenizer) == 64
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    assert make_model(cfg, CHAIN, 0, a) == a
    with pytest.raises(ValueError, match="not made from these"):
        make_model(cfg, CHAIN, 1, a)
    random_cfg = ModelConfig(init="random", architecture={**TINY, "model_type": "llama"})
    jsonl = DataConfig(path="d.jsonl")
    assert (make_model(random_cfg, jsonl, 0, tmp_path / "r") / "config.json").is_file()
    with pytest.raises(ValueError, match="demonstrator"):
        make_model(cfg, jsonl, 0, tmp_path / "w")


def test_training_learns() -> None:
    """Thirty steps of a tiny model bring the loss from ln 64 to below ln 10: it knows which characters can come."""
    from jetrl_megatron.rl.warmstart import _build

    torch.manual_seed(0)
    tokenizer = tasks.build_char_tokenizer(64)
    cfg = WarmstartConfig(num_steps=30, batch_size=16, lr=1e-2, warmup_steps=2)
    losses = train(_build({**TINY}, tokenizer), tokenizer, cfg, CHAIN, 0)
    assert losses[0] == pytest.approx(4.16, abs=0.2)
    assert losses[-1] < 2.5


@pytest.mark.slow
def test_quickstart_warm_start_leaves_room_for_rl(tmp_path: Path) -> None:
    """The shipped settings end between .2 and .4 sampled pass rate (measured: .27 to .32 over five seeds; the
    demonstrator's own rate is .34), so that RL starts with a signal and has something to gain."""
    import yaml

    raw = yaml.safe_load((Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml").read_text())
    model_cfg, data = ModelConfig(**raw["model"]), DataConfig(**raw["data"])
    folder = make_model(model_cfg, data, 0, tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = PromptSource(data, tokenizer, 0).eval_prompts(400)
    ids = torch.tensor([prompt.token_ids for prompt in prompts])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(data.max_digits + 1):
            probabilities = model(ids, use_cache=False).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    texts = [tokenizer.decode(row).partition("<eos>")[0] for row in ids]
    rate = sum(text == p.text + p.answer for text, p in zip(texts, prompts, strict=True)) / len(prompts)
    assert 0.2 < rate < 0.4
