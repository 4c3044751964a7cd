"""Checks and measurements of the GPU kernels, for a machine with nothing but torch and triton (`python -m
jetrl_megatron.ops.gpu`)."""
