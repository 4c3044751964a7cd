"""The run configuration: frozen, strict pydantic models, one class per section of the YAML file.

Every field carries a one-line help text, which `jetrl schema` prints. Cross-field rules live in the validators here;
rules that need the model's dims (block alignment, head counts) live in `config.plan`.
This package imports neither torch nor any other heavy library, so `jetrl check` answers in under a second.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Precision = Literal["bf16", "fp8"]


def _f(default: Any, help_text: str, **rules: Any) -> Any:
    """Field with a default, a one-line help text and optional numeric rules (ge, gt, le, lt)."""
    return Field(default, description=help_text, **rules)


class Section(BaseModel):
    # strict: "3" is not 3 and true is not 1; NaN and infinity are never a setting
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        hide_input_in_errors=True,
    )


class WarmstartConfig(Section):
    """Supervised warm start of a tiny model, made by code (HF transformers, fp32), before RL."""

    num_steps: int = _f(180, "optimizer steps", ge=1)
    batch_size: int = _f(48, "sequences per step", ge=1)
    lr: float = _f(7e-3, "peak AdamW learning rate", gt=0)
    warmup_steps: int = _f(20, "linear warm-up steps; afterwards linear decay to 10 %", ge=0)
    demonstrator_error: float = _f(0.06, "probability that the demonstrator gets one step wrong", ge=0, lt=1)


class ModelConfig(Section):
    path: str | None = _f(None, "HF folder, or torch_dist checkpoint with hf/; required for init: hf")
    init: Literal["hf", "random", "warmstart"] = _f("hf", "where the first weights come from")
    architecture: dict[str, Any] | None = _f(
        None, "HF config.json fields (incl. model_type) of the model to make; required for init: random | warmstart"
    )
    warmstart: WarmstartConfig = _f(WarmstartConfig(), "settings of init: warmstart")

    @model_validator(mode="after")
    def _source(self) -> ModelConfig:
        if self.init == "hf" and not self.path:
            raise ValueError("path: missing; rule: init hf reads an HF folder; fix: set model.path=DIR")
        if self.init != "hf" and not (self.architecture and "model_type" in self.architecture):
            raise ValueError(
                f"architecture: missing or without model_type; rule: init {self.init} builds the model from it; "
                "fix: set model.architecture to HF config.json fields, see configs/quickstart.yaml"
            )
        return self


class PrecisionConfig(Section):
    train: Precision = _f("fp8", "forward precision of linears in training")
    rollout: Precision = _f("fp8", "forward precision of linears in the engine")
    granularity: Literal["block", "tensor", "channel"] = _f(
        "block", "block: 1x128 activations, 128x128 weights; tensor: one scale; channel: one scale per row"
    )
    scale_format: Literal["fp32", "pow2"] = _f("fp32", "fp32: amax/448; pow2: next power of two")
    dgrad: Precision = _f("fp8", "precision of the input-gradient GEMM (bf16 where train: bf16)")
    wgrad: Precision = _f("fp8", "precision of the weight-gradient GEMM (bf16 where train: bf16)")
    saved_activation: Literal["rowwise", "columnwise", "bf16"] = _f(
        "rowwise", "form in which FProp's input is kept for WGrad"
    )
    backend: Literal["auto", "emulated", "triton", "deep_gemm"] = _f(
        "auto", "who computes FP8 linears, in training and engines alike; auto: the fastest that this machine can run"
    )
    misaligned: Literal["error", "shard_local"] = _f(
        "error", "tensor-parallel shards that cut a 1x128 activation block: refuse, or quantize per shard"
    )
    flow_check: Literal["error", "warn"] = _f(
        "error", "at start-up, rollout's precision flow must be part of the training forward's: refuse, or only say so"
    )


class ParallelConfig(Section):
    tensor: int = _f(1, "tensor-parallel size of training", ge=1)
    pipeline: int = _f(1, "pipeline-parallel size of training", ge=1)
    virtual_pipeline: int = _f(1, "model chunks per pipeline stage, in an interleaved schedule", ge=1)
    expert: int = _f(1, "expert-parallel size of training: divides tensor * data", ge=1)
    grouped_experts: bool = _f(True, "experts as grouped GEMMs; false: one after the other, the same bits")
    sequence: bool = _f(False, "sequence parallelism (needs tensor > 1)")
    data: int | None = _f(None, "data-parallel size; null: derived from the world size", ge=1)
    tp_invariant: bool | None = _f(
        None, "row-parallel sums in a fixed tree, equal at TP 1, 2, 4; null: true on the emulated backend"
    )

    @model_validator(mode="after")
    def _sequence(self) -> ParallelConfig:
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence: true; rule: sequence parallelism splits over the tensor-parallel group; "
                "fix: set parallel.tensor > 1 or parallel.sequence=false"
            )
        return self

    @model_validator(mode="after")
    def _virtual_pipeline(self) -> ParallelConfig:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"virtual_pipeline: {self.virtual_pipeline}; rule: more than one chunk per stage needs two stages; "
                "fix: set parallel.pipeline > 1 or parallel.virtual_pipeline=1"
            )
        return self

    @model_validator(mode="after")
    def _experts(self) -> ParallelConfig:
        if self.data is not None and self.tensor * self.data % self.expert:
            raise ValueError(
                f"expert: {self.expert}; rule: divides tensor * data ({self.tensor * self.data}), the ranks that share "
                f"the experts; fix: set parallel.data to a multiple of {self.least_data}"
            )
        return self

    @property
    def least_data(self) -> int:
        """The smallest data-parallel size whose ranks can share the experts."""
        return self.expert // math.gcd(self.expert, self.tensor)

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline


class RolloutConfig(Section):
    engine: Literal["sglang"] = _f("sglang", "rollout engine")
    num_engines: int = _f(1, "engines; the prompts of a step are split over them", ge=1)
    tensor_parallel: int = _f(1, "tensor-parallel size of one engine", ge=1)
    expert_parallel: int = _f(1, "expert-parallel size of one engine: 1 or tensor_parallel", ge=1)
    port_base: int = _f(0, "first port for the engines; 0: free ports", ge=0, le=65000)
    temperature: float = _f(1.0, "sampling temperature; 0: greedy", ge=0)
    top_p: float = _f(1.0, "nucleus sampling; log-probs stay over the full vocabulary", gt=0, le=1)
    top_k: int = _f(-1, "top-k sampling; -1: off", ge=-1)
    max_new_tokens: int = _f(256, "response tokens at most, incl. EOS", ge=1)
    samples_per_prompt: int = _f(8, "responses per prompt (the group)", ge=1)
    stop_token_ids: tuple[int, ...] | None = _f(None, "stop ids; null: the model's EOS ids", strict=False)
    max_running_requests: int = _f(64, "sequences decoded together", ge=1)
    max_total_tokens: int = _f(16384, "KV-cache capacity of one engine, in tokens", ge=16)
    chunked_prefill_tokens: int = _f(512, "prefill chunk size, in tokens", ge=16)
    mem_fraction_static: float = _f(
        0.3, "engine weights and KV cache: share of a GPU's memory free at its start", gt=0, lt=1
    )
    cuda_graphs: bool = _f(
        True,
        "decode through CUDA graphs on the triton and deep_gemm backends; with experts: engines of one GPU only",
    )
    start_timeout_s: float = _f(180.0, "seconds until an engine must be up", gt=0)
    request_timeout_s: float = _f(1800.0, "seconds until one rollout call must be done", gt=0)
    max_restarts: int = _f(3, "engine restarts per run before the run fails", ge=0)


class AlgorithmConfig(Section):
    name: Literal["grpo"] = _f("grpo", "advantage estimator and loss")
    std_normalization: bool = _f(True, "divide group advantages by the group's std")
    std_kind: Literal["population", "sample"] = _f("population", "which standard deviation")
    clip_low: float = _f(0.2, "PPO clip: ratio >= 1 - clip_low", ge=0, lt=1)
    clip_high: float = _f(0.2, "PPO clip: ratio <= 1 + clip_high", ge=0)
    kl_coef: float = _f(0.0, "weight of the KL to the reference policy in the loss; 0: no reference model", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = _f("k3", "estimator of the KL to the reference")
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = _f(
        "token_mean", "how token losses become one number, over the global batch"
    )
    updates_per_step: int = _f(1, "optimizer updates per rollout batch (mini-batches)", ge=1)
    recompute_old_logprobs: bool = _f(
        True, "run a training forward for pi_old; false: use the engine's log-probs (legal when exact)"
    )


class OptimizerConfig(Section):
    lr: float = _f(1e-6, "peak learning rate", gt=0)
    min_lr: float = _f(0.0, "final learning rate of a decaying schedule", ge=0)
    warmup_steps: int = _f(0, "linear warm-up, in steps", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = _f("constant", "decay after the warm-up")
    beta1: float = _f(0.9, "Adam beta1", ge=0, lt=1)
    beta2: float = _f(0.95, "Adam beta2", ge=0, lt=1)
    eps: float = _f(1e-8, "Adam epsilon", gt=0)
    weight_decay: float = _f(0.0, "decoupled weight decay", ge=0)
    clip_grad: float = _f(1.0, "global gradient-norm clip; 0: off", ge=0)


class DataConfig(Section):
    task: Literal["chain", "sort", "arithmetic", "jsonl", "hf"] = _f(
        "jsonl", "chain | sort | arithmetic: generated; jsonl: data.path; hf: HF datasets name or local path"
    )
    path: str | None = _f(None, "JSONL file (task: jsonl) or HF dataset name or folder (task: hf)")
    subset: str | None = _f(None, "HF dataset configuration name")
    split: str = _f("train", "HF dataset split")
    prompt_field: str = _f("question", "column with the prompt")
    answer_field: str = _f("answer", "column with the reference answer")
    prompt_template: str = _f("{prompt}", "user text; {prompt} is the prompt column")
    system_prompt: str | None = _f(None, "system message of the chat template")
    chat_template: bool = _f(True, "apply the tokenizer's chat template (jsonl, hf)")
    max_prompt_tokens: int = _f(512, "longer prompts are an error that names the row", ge=1)
    min_digits: int = _f(12, "generated tasks: least number of digits", ge=1)
    max_digits: int = _f(24, "generated tasks: largest number of digits", ge=1)
    shuffle: bool = _f(True, "shuffle rows, anew for every epoch, by trainer.seed")

    @model_validator(mode="after")
    def _source(self) -> DataConfig:
        if self.task in ("jsonl", "hf") and not self.path:
            raise ValueError(f"path: missing; rule: task {self.task} reads data.path; fix: set data.path=...")
        if self.min_digits > self.max_digits:
            raise ValueError(
                f"min_digits: {self.min_digits}; rule: min_digits <= max_digits ({self.max_digits}); fix: lower it"
            )
        if "{prompt}" not in self.prompt_template:
            raise ValueError(
                f"prompt_template: {self.prompt_template!r}; rule: contains {{prompt}}; fix: put {{prompt}} where the "
                "prompt column goes"
            )
        return self

    @property
    def generated(self) -> bool:
        return self.task in ("chain", "sort", "arithmetic")


class RewardConfig(Section):
    kind: str = _f("exact_match", "exact_match | math_verify | gsm8k | package.module:function")
    answer_weight: float = _f(1.0, "reward of a right answer", ge=0)
    format_weight: float = _f(0.0, "reward of the asked format, also without a right answer", ge=0)
    timeout_s: float = _f(5.0, "seconds per sample before a reward function is given up", gt=0)


class MismatchConfig(Section):
    require_exact: bool | None = _f(
        None, "fail the step unless max |dlogp| == 0.0; null: true when train and rollout precision are equal"
    )
    correction: Literal["none", "tis"] = _f("none", "rollout correction where the two sides differ")
    tis_clip: float = _f(2.0, "TIS: weights are truncated at this value", gt=0)


class CheckpointConfig(Section):
    every_steps: int = _f(5, "steps between checkpoints; 0: none", ge=0)
    keep: int = _f(2, "checkpoints to keep", ge=1)
    export_hf: bool = _f(True, "write an HF folder at the end of the run")


class EvalConfig(Section):
    every_steps: int = _f(0, "steps between evaluations; 0: none", ge=0)
    num_prompts: int = _f(64, "held-out prompts", ge=1)
    samples_per_prompt: int = _f(1, "responses per prompt", ge=1)
    temperature: float = _f(0.0, "sampling temperature of the evaluation", ge=0)
    path: str | None = _f(None, "JSONL with the held-out rows; null: generated tasks draw from another seed")


class TrainerConfig(Section):
    num_steps: int = _f(10, "RL steps", ge=1)
    prompts_per_step: int = _f(16, "prompts per step", ge=1)
    micro_batch_tokens: int = _f(4096, "packed tokens per micro-batch", ge=1)
    seed: int = _f(0, "seed of data order, sampling and initialisation", ge=0)
    recompute: bool = _f(False, "full activation recompute")
    num_threads: int = _f(1, "CPU threads per process", ge=1)


class SyncConfig(Section):
    bucket_bytes: int = _f(256 * 1024 * 1024, "bytes per weight bucket", ge=1)
    staging_dir: str = _f("/dev/shm", "folder (host memory) through which buckets reach the engines")


class LoggingConfig(Section):
    tensorboard: bool = _f(True, "write TensorBoard events")
    wandb_project: str | None = _f(None, "Weights & Biases project; null: off")
    samples_per_step: int = _f(16, "samples kept per step in samples/", ge=0)
    progress: bool = _f(True, "rich progress display")


class RunConfig(Section):
    """The whole run. Sections below the trainer receive only their own part."""

    name: str = _f("run", "run name, used for the default run folder", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    model: ModelConfig = Field(description="the policy")
    precision: PrecisionConfig = _f(PrecisionConfig(), "the precision flow")
    parallel: ParallelConfig = _f(ParallelConfig(), "layout of training")
    rollout: RolloutConfig = _f(RolloutConfig(), "the engine and sampling")
    algorithm: AlgorithmConfig = _f(AlgorithmConfig(), "advantages and loss")
    optimizer: OptimizerConfig = _f(OptimizerConfig(), "AdamW and its schedule")
    data: DataConfig = Field(description="prompts")
    reward: RewardConfig = _f(RewardConfig(), "reward")
    mismatch: MismatchConfig = _f(MismatchConfig(), "training-rollout mismatch")
    checkpoint: CheckpointConfig = _f(CheckpointConfig(), "checkpoints")
    eval: EvalConfig = _f(EvalConfig(), "evaluation")
    trainer: TrainerConfig = _f(TrainerConfig(), "the loop")
    sync: SyncConfig = _f(SyncConfig(), "weight sync")
    logging: LoggingConfig = _f(LoggingConfig(), "metrics and samples")

    @model_validator(mode="after")
    def _exactness(self) -> RunConfig:
        if self.mismatch.require_exact and self.precision.train != self.precision.rollout:
            raise ValueError(
                f"mismatch.require_exact: true with precision.train={self.precision.train}, "
                f"precision.rollout={self.precision.rollout}; rule: exact needs one precision on both sides; "
                "fix: make them equal or set mismatch.require_exact=false"
            )
        if self.require_exact and self.precision.flow_check == "warn":
            raise ValueError(
                "precision.flow_check: warn; rule: where exactness is required, unequal flows are an error; "
                "fix: flow_check=error or mismatch.require_exact=false"
            )
        if self.require_exact and self.precision.granularity == "tensor" and self.precision.train == "fp8":
            raise ValueError(
                "precision.granularity: tensor; rule: a per-tensor activation scale depends on the batch, so training "
                "and rollout cannot agree exactly; fix: granularity=block or mismatch.require_exact=false"
            )
        if not self.algorithm.recompute_old_logprobs and not self.require_exact:
            raise ValueError(
                "algorithm.recompute_old_logprobs: false; rule: legal only when mismatch.require_exact holds; "
                "fix: set it to true"
            )
        batch = self.trainer.prompts_per_step * self.rollout.samples_per_prompt
        if batch % self.algorithm.updates_per_step:
            raise ValueError(
                f"algorithm.updates_per_step: {self.algorithm.updates_per_step}; rule: divides prompts_per_step * "
                f"samples_per_prompt = {batch}; fix: choose a divisor"
            )
        return self

    @property
    def require_exact(self) -> bool:
        explicit = self.mismatch.require_exact
        return self.precision.train == self.precision.rollout if explicit is None else explicit
