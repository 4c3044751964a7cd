# shellcheck shell=bash
# Nodes with 8 H100 and InfiniBand. Not yet run on such nodes by this project. A value that is set already wins.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export PYTHONUNBUFFERED=1
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
# Megatron-Core orders tensor-parallel communication before computation by this.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Nodes have several networks, and the first is often the wrong one: name the interface of the job's network here.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
