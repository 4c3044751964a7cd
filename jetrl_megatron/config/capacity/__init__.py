"""Memory per GPU and expected step time of a configuration, from formulas (docs/planning.md). Torch-free.

Bytes of weights, gradients, optimizer states and KV cache are exact; activations follow what autograd keeps; times are
an estimate by a roofline.
"""

from jetrl_megatron.config.capacity.hardware import H100, Hardware
from jetrl_megatron.config.capacity.layout import Layout, resolve_layout
from jetrl_megatron.config.capacity.memory import Memory, memory_of
from jetrl_megatron.config.capacity.placement import EnginePlace, Placement, place_engines
from jetrl_megatron.config.capacity.report import CapacityPlan, make_plan
from jetrl_megatron.config.capacity.steptime import Lengths, StepTime, step_time

__all__ = [
    "H100",
    "CapacityPlan",
    "EnginePlace",
    "Hardware",
    "Layout",
    "Lengths",
    "Memory",
    "Placement",
    "StepTime",
    "make_plan",
    "memory_of",
    "place_engines",
    "resolve_layout",
    "step_time",
]
