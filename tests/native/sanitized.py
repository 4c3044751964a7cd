"""Runs the kernel tests against a library built with AddressSanitizer and UndefinedBehaviorSanitizer (preloaded)."""

from __future__ import annotations

import sys

import pytest

from jetrl_megatron import native

if __name__ == "__main__":
    plain = tuple(flag for flag in native.FLAGS if flag != "-O3")
    native.FLAGS = (*plain, "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    sys.exit(
        pytest.main(
            ["tests/native/test_kernels.py", "-q", "-x", "-m", "not slow", "-k", "not compiler and not damaged"]
        )
    )
