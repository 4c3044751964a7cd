"""The conversion plan of one model: every Megatron parameter, every HF tensor, nothing left over."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.weights.families import family_rules
from jetrl_megatron.weights.families.common import EMBEDDING, OUTPUT, tied_output_copy
from jetrl_megatron.weights.rules import Rule

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # buffers that older checkpoints carry; computed, not learned
LM_HEAD = "lm_head.weight"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def shift_layer(megatron_name: str, offset: int) -> str:
    """`decoder.layers.N.x` -> `decoder.layers.(N+offset).x`; other names unchanged.

    A pipeline stage's modules count from 0, rules count globally: global = shift_layer(local, first_layer) and
    local = shift_layer(global, -first_layer).
    """
    return _LAYER.sub(lambda match: f"decoder.layers.{int(match.group(1)) + offset}.", megatron_name)


def shift_expert(megatron_name: str, offset: int) -> str:
    """`...local_experts.E.x` -> `...local_experts.(E+offset).x`; other names unchanged. As `shift_layer`, for the
    experts of one expert-parallel rank."""
    return _EXPERT.sub(lambda match: f".local_experts.{int(match.group(1)) + offset}.", megatron_name)


def expert_of(rule: Rule) -> int | None:
    """Global index of the expert a rule belongs to; None for everything else."""
    match = _EXPERT.search(rule.megatron_name)
    return int(match.group(1)) if match else None


def layer_of(rule: Rule) -> int | None:
    """Global layer index of a rule; None for embedding, final norm and output layer."""
    match = _LAYER.match(rule.megatron_name)
    return int(match.group(1)) if match else None


class ConversionPlan:
    """All rules of a model, in HF layer order (embedding, layers, final norm, output).

    Raises ValueError for an unknown model_type.
    """

    def __init__(self, dims: ModelDims) -> None:
        self.dims = dims
        self.rules: tuple[Rule, ...] = tuple(family_rules(dims))
        self._by_name = {rule.megatron_name: rule for rule in self.rules}
        assert len(self._by_name) == len(self.rules), "two rules for one Megatron parameter"
        if dims.tied_embeddings:
            self._by_name[OUTPUT] = tied_output_copy(dims)

    def rule_for(self, megatron_name: str) -> Rule:
        """The rule of a Megatron parameter (global layer index). For a tied model `output_layer.weight` is the copy
        on the last pipeline stage. Raises ValueError for a name that has none."""
        if megatron_name not in self._by_name:
            near = difflib.get_close_matches(megatron_name, self._by_name, 1)
            raise ValueError(
                f"{megatron_name}: no rule of {self.dims.model_type}; rule: every parameter has one; "
                f"fix: add it to the family{f' (nearest: {near[0]})' if near else ''}"
            )
        return self._by_name[megatron_name]

    def hf_names(self) -> list[str]:
        """Every HF tensor of the model, in plan order, each once."""
        return [hf.name for rule in self.rules for hf in rule.hf]

    def quantized_hf_names(self) -> list[str]:
        """The HF weights that run in FP8, in plan order."""
        return [hf.name for rule in self.rules if rule.quantized for hf in rule.hf]

    def check_tensor_parallel(self, tp: int) -> None:
        """Raises ValueError, naming a tensor and the sizes that work, if some parameter cannot be cut tp ways."""
        for rule in self.rules:
            rule.check_tensor_parallel(tp)

    def check_names(self, names: Iterable[str]) -> None:
        """Conversion is total: `names` (of a checkpoint) must be exactly `hf_names()`.

        Let pass: rotary buffers, and `lm_head.weight` beside a tied embedding (`HfCheckpoint.verify` compares the
        two). Raises ValueError that names the missing and the unused tensors.
        """
        expected, found = set(self.hf_names()), {n for n in names if not n.endswith(IGNORED_SUFFIXES)}
        if self.dims.tied_embeddings:
            found.discard(LM_HEAD)
        missing, unused = sorted(expected - found), sorted(found - expected)
        if missing or unused:
            raise ValueError(
                f"checkpoint tensors: missing {_listed(missing)}, unused {_listed(unused)}; rule: exactly the "
                f"{len(expected)} tensors of {self.dims.model_type} with {self.dims.num_layers} layers; "
                f"fix: check model_type, num_hidden_layers and tie_word_embeddings in the model's config.json"
            )

    def stage_rules(
        self, first_layer: int, num_layers: int, has_embedding: bool, has_output: bool, experts: range | None = None
    ) -> list[Rule]:
        """Rules of one pipeline stage: layers [first_layer, first_layer + num_layers), names with GLOBAL indices;
        `experts`: of these experts only (None: of all).

        A stage with the output but without the embedding of a tied model holds a copy of the embedding as
        `output_layer.weight`: its rule loads from `model.embed_tokens.weight` and has export=False, so that only the
        first stage writes it. Raises ValueError if the layers are not within the model.
        """
        last_layer = first_layer + num_layers
        if first_layer < 0 or num_layers < 0 or last_layer > self.dims.num_layers:
            raise ValueError(
                f"pipeline stage: layers [{first_layer}, {last_layer}); rule: within [0, {self.dims.num_layers}); "
                f"fix: correct the pipeline split"
            )
        rules = []
        for rule in self.rules:
            layer = layer_of(rule)
            if layer is not None:
                keep = first_layer <= layer < last_layer
            else:
                keep = has_embedding if rule.megatron_name == EMBEDDING else has_output
            expert = expert_of(rule)
            if keep and (expert is None or experts is None or expert in experts):
                rules.append(rule)
        if self.dims.tied_embeddings and has_output and not has_embedding:
            rules.append(self._by_name[OUTPUT])
        return rules


def _listed(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit]) or "none"
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
