"""Makers of configurations and of small HF folders, shared by the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes as transformers names them, written out here on purpose (not imported from the code under test)."""
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, h)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (h,),
            p + "post_attention_layernorm.weight": (h,),
            p + "self_attn.q_proj.weight": (q, h),
            p + "self_attn.k_proj.weight": (kv, h),
            p + "self_attn.v_proj.weight": (kv, h),
            p + "self_attn.o_proj.weight": (h, q),
        }
        mlps = [p + "mlp."]
        if config["model_type"] == "qwen3_moe":
            mlps = [f"{p}mlp.experts.{e}." for e in range(config["num_experts"])]
            f = config["moe_intermediate_size"]
            shapes[p + "mlp.gate.weight"] = (config["num_experts"], h)
        for mlp in mlps:
            shapes |= {
                mlp + "gate_proj.weight": (f, h),
                mlp + "up_proj.weight": (f, h),
                mlp + "down_proj.weight": (h, f),
            }
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            shapes |= {p + f"self_attn.{n}_norm.weight": (config["head_dim"],) for n in "qk"}
        if config["model_type"] == "qwen2":
            shapes |= {p + f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", q), ("k", kv), ("v", kv))}
    return shapes


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path)


@pytest.fixture
def hf_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes an HF folder; keywords change config.json."""

    def make(**changes: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        config = {**TINY, **changes}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
        write_weights(folder / "model.safetensors", hf_shapes(config))
        return folder

    return make


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1", "answer": "2"}\n\n{"question": "2+2", "answer": 4}\n')
    return path


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes YAML text to a file."""

    def make(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return make
