"""Hugging Face <-> Megatron: rules per model family, conversion plans, streaming readers and writers."""
