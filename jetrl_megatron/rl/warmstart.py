"""Tiny models made by code: random, or warm-started by supervised training on a sloppy demonstrator.

The warm start is plain HF transformers in fp32 on one CPU thread's worth of work; what follows (RL) sees only the
folder it writes: bf16 safetensors, config.json, generation_config.json and the character tokenizer.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from jetrl_megatron.config.schema import DataConfig, ModelConfig, WarmstartConfig
from jetrl_megatron.rl import tasks

log = logging.getLogger(__name__)

BETAS = (0.9, 0.95)
CLIP_GRAD = 1.0
FINAL_LR_FRACTION = 0.1
IGNORED_LABEL = -100
LOG_EVERY_STEPS = 10
RECIPE_FILE = "jetrl_recipe.json"


def make_model(model_cfg: ModelConfig, data: DataConfig, seed: int, out: Path) -> Path:
    """Writes the HF folder `out` for `model.init: random | warmstart` and returns it.

    Deterministic for equal arguments (on one machine and thread count). `out` appears complete or not at all. If it
    exists and was made from the same arguments, it is kept; if from others, ValueError. Raises ValueError also for
    init: hf, an architecture without vocab_size, and a warm start on data without a demonstrator.
    """
    recipe = _recipe(model_cfg, data, seed)
    if out.exists():
        return _existing(out, recipe)
    architecture = dict(model_cfg.architecture or {})
    if model_cfg.init == "hf" or "vocab_size" not in architecture:
        raise ValueError("model.architecture: needs vocab_size, and model.init: random | warmstart; fix: set them")
    if model_cfg.init == "warmstart" and not data.generated:
        raise ValueError(
            f"model.init: warmstart with data.task={data.task}; rule: only generated tasks "
            f"({', '.join(sorted(tasks.TASKS))}) have a demonstrator; fix: model.init=hf or data.task"
        )
    tokenizer = tasks.build_char_tokenizer(int(architecture["vocab_size"]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(architecture, tokenizer)
        if model_cfg.init == "warmstart":
            train(model, tokenizer, model_cfg.warmstart, data, seed)
    _save(model, tokenizer, recipe, out)
    return out


def _recipe(model_cfg: ModelConfig, data: DataConfig, seed: int) -> dict[str, Any]:
    """What the written folder depends on, as JSON."""
    recipe: dict[str, Any] = {"init": model_cfg.init, "architecture": model_cfg.architecture, "seed": seed}
    if model_cfg.init == "warmstart":
        recipe["warmstart"] = model_cfg.warmstart.model_dump()
        recipe["data"] = {"task": data.task, "min_digits": data.min_digits, "max_digits": data.max_digits}
    return dict(json.loads(json.dumps(recipe)))


def _existing(out: Path, recipe: dict[str, Any]) -> Path:
    path = out / RECIPE_FILE
    if path.is_file() and json.loads(path.read_text()) == recipe:
        log.info("model: %s was made from the same settings, kept", out)
        return out
    raise ValueError(f"{out}: exists and was not made from these model settings; fix: another run folder or remove it")


def _build(architecture: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    fields = {key: value for key, value in architecture.items() if key != "model_type"}
    config = AutoConfig.for_model(architecture["model_type"], **{**fields, **special})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config = GenerationConfig(**special)
    return model


def demonstrations(
    tokenizer: PreTrainedTokenizerFast, cfg: WarmstartConfig, data: DataConfig, seed: int, step: int
) -> tuple[Tensor, Tensor]:
    """(input_ids_BS, labels_BS) int64 of one supervised step: prompt, sloppy response, EOS, then padding on the right.

    Labels are the ids on response and EOS positions, -100 elsewhere. Right padding behind a causal mask is seen by no
    real token, so no attention mask is needed.
    """
    task = tasks.get_task(data.task)
    ids, labels = [], []
    for row in range(step * cfg.batch_size, (step + 1) * cfg.batch_size):
        problem = tasks.problem(task, "warmstart", seed, row, data.min_digits, data.max_digits)
        rng = random.Random(f"demonstrator/{seed}/{row}")
        answer = task.demonstration(problem, rng, cfg.demonstrator_error)
        prompt_ids, answer_ids = tokenizer([task.prompt(problem, data.max_digits), answer])["input_ids"]
        response_ids = [*answer_ids, tokenizer.eos_token_id]
        ids.append([*prompt_ids, *response_ids])
        labels.append([IGNORED_LABEL] * len(prompt_ids) + response_ids)
    width = max(map(len, ids))
    return _padded(ids, width, int(tokenizer.pad_token_id)), _padded(labels, width, IGNORED_LABEL)


def _padded(rows: list[list[int]], width: int, value: int) -> Tensor:
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def learning_rate(step: int, cfg: WarmstartConfig) -> float:
    """Linear warm-up to cfg.lr, then linear decay to 10 % of it at the last step."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    progress = (step - cfg.warmup_steps) / max(cfg.num_steps - cfg.warmup_steps - 1, 1)
    return cfg.lr * (1.0 - (1.0 - FINAL_LR_FRACTION) * min(progress, 1.0))


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cfg: WarmstartConfig, data: DataConfig, seed: int
) -> list[float]:
    """Trains in place, on the mean loss over response tokens; returns the loss (nats per token) of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=BETAS, weight_decay=0.0)
    model.train()
    losses: list[float] = []
    start_s = time.perf_counter()
    for step in range(cfg.num_steps):
        input_ids, labels = demonstrations(tokenizer, cfg, data, seed, step)
        logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % LOG_EVERY_STEPS == 0 or step + 1 == cfg.num_steps:
            elapsed_s = time.perf_counter() - start_s
            log.info("warm start: step %d/%d  loss %.3f  %.0f s", step + 1, cfg.num_steps, losses[-1], elapsed_s)
    model.eval()
    return losses


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: dict[str, Any], out: Path) -> None:
    """bf16 folder, built beside `out` and renamed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model.to(torch.bfloat16).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        (staging / RECIPE_FILE).write_text(json.dumps(recipe, indent=2, sort_keys=True) + "\n")
        staging.chmod(0o755)
        os.rename(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
