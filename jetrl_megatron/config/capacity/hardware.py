"""Rates of the machine that a plan is for, each with its source. The efficiencies are assumptions, not measurements."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """Peak rates in FLOP/s and bytes/s, and the share of each that is assumed to be reached."""

    name: str
    bf16_flops: float
    fp8_flops: float
    hbm_bytes_s: float
    nvlink_bytes_s: float
    network_bytes_s: float
    pcie_bytes_s: float
    checksum_bytes_s: float
    gemm_efficiency: float
    attention_efficiency: float
    hbm_efficiency: float
    link_efficiency: float
    collective_latency_s: float
    gpus_per_node: int
    runtime_bytes: int

    def gemm_rate(self, precision: str) -> float:
        """FLOP/s of GEMMs that is assumed to be reached."""
        return (self.fp8_flops if precision == "fp8" else self.bf16_flops) * self.gemm_efficiency


H100 = Hardware(
    name="H100 SXM",
    # NVIDIA H100 Tensor Core GPU datasheet, SXM column: 1,979 (BF16) and 3,958 (FP8) TFLOP/s with sparsity, half of
    # them dense; 3.35 TB/s of HBM3; NVLink 900 GB/s and PCIe Gen5 128 GB/s, both directions together.
    bf16_flops=989.5e12,
    fp8_flops=1979e12,
    hbm_bytes_s=3.35e12,
    nvlink_bytes_s=450e9,
    pcie_bytes_s=64e9,
    # One 400 Gb/s port per GPU, as in NVIDIA's DGX H100 user guide (8 ConnectX-7 for compute).
    network_bytes_s=50e9,
    # BLAKE2b of Python's hashlib, 256 MiB on one core: measured 0.71 GB/s on a busy AVX-512 server core.
    checksum_bytes_s=0.7e9,
    # Assumed, not measured by this project: shares of the peaks that large GEMMs, attention, weight streaming and
    # collectives reach; the time of one small all-reduce; and the memory of CUDA, NCCL and the allocator.
    gemm_efficiency=0.5,
    attention_efficiency=0.35,
    hbm_efficiency=0.65,
    link_efficiency=0.7,
    collective_latency_s=12e-6,
    gpus_per_node=8,
    runtime_bytes=3 * GIB,
)
