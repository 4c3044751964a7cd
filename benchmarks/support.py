"""What the benchmarks share: kernel sets, fresh processes, the machine's description, results as JSON, models."""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import os
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from jetrl_megatron.cli.doctor import num_cores
from jetrl_megatron.native import Native, native, status

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SMOLLM2 = ROOT / "runs" / "models" / "SmolLM2-135M-Instruct"  # where the recipe in README.md puts it

# hidden size, intermediate size, heads, key heads, head dim, vocabulary of Qwen3-8B, -14B, -32B.
SHAPES = {
    "small": (256, 512, 4, 2, 64, 1024),
    "8B": (4096, 12288, 32, 8, 128, 151936),
    "14B": (5120, 17408, 40, 8, 128, 151936),
    "32B": (5120, 25600, 64, 8, 128, 151936),
}
KERNEL_SWITCH = "JETRL_NATIVE"


def kernel_sets() -> list[str]:
    """Forms of our operators that run here; all give the same bits. `torch` needs no compiler."""
    return ["compiled", "torch"] if native() is not None else ["torch"]


@contextlib.contextmanager
def using_kernels(name: str) -> Iterator[None]:
    """Processes started inside the block use this kernel set."""
    before = os.environ.pop(KERNEL_SWITCH, None)
    if name == "torch":
        os.environ[KERNEL_SWITCH] = "0"
    try:
        yield
    finally:
        os.environ.pop(KERNEL_SWITCH, None)
        if before is not None:
            os.environ[KERNEL_SWITCH] = before


def in_fresh_process(kernels: str, function: Callable[..., T], *arguments: Any) -> T:
    """The function's result from a process of its own that uses this kernel set, without third-party warnings."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    context = multiprocessing.get_context("spawn")
    with using_kernels(kernels), ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return pool.submit(_checked, kernels, function, arguments).result()


def _checked(kernels: str, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    assert (native() is not None) == (kernels == "compiled"), status()
    return function(*arguments)


def machine() -> dict[str, Any]:
    """What a result depends on besides the code. load_average: of the last minute, i.e. of other work too."""
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiled_kernels": found.level if isinstance(found := status(), Native) else found.reason,
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_results(name: str, results: dict[str, Any]) -> Path:
    """benchmarks/results/NAME.json, with the machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n", encoding="utf-8")
    return path


def qwen3_config(shape: str, layers: int, length: int) -> dict[str, Any]:
    """config.json of a Qwen3 of one of SHAPES without special tokens, for up to `length` tokens."""
    hidden, inner, heads, kv_heads, head_dim, vocab = SHAPES[shape]
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max(length, 4096),
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }


def random_qwen3(config: dict[str, Any]) -> Any:
    """A random bf16 transformers model of such a config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "torch_dtype")}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **fields), dtype=torch.bfloat16)


def random_llama(folder: Path) -> Path:
    """A random bf16 Llama of SmolLM2-135M's shapes but 4 layers and 4096 words, as an HF folder without a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=4096,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder
