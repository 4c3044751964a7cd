# shellcheck shell=bash
# Machines without a GPU. A value that is set already wins.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONUNBUFFERED=1
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # third-party deprecations, dozens a start
: "${JETRL_RANKS_PER_NODE:=1}"
