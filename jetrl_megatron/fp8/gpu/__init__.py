"""Triton kernels of the FP8 path. Importing this package imports triton; nothing outside `fp8` and tests does so at start."""
