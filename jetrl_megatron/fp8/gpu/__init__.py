"""Triton kernels of the FP8 path. Importing a module of this package imports triton; `fp8` itself does not."""
