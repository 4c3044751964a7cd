"""Reinforcement learning of LLMs in which training (Megatron-Core) and rollout (SGLang) share one FP8 flow."""

__version__ = "0.1.0"
