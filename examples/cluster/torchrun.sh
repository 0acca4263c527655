#!/bin/bash
# Started on each machine with its number: ./torchrun.sh 0 on the first, ./torchrun.sh 1 on the second.
set -euo pipefail
RANK=$1 MACHINES=${MACHINES:-2} PER_NODE=${PER_NODE:-8} MAIN=${MAIN:-nodea} PORT=${PORT:-29500} SCRIPT=${SCRIPT:-train.py}
export HF_PARALLEL_CONFIG=${FILE:-mine.yaml}  # torchrun passes no file on
hf-parallel doctor --peers "$HF_PARALLEL_CONFIG" --num-machines "$MACHINES" --machine-rank "$RANK" \
    --main-process-ip "$MAIN" --main-process-port "$PORT"
exec torchrun --nnodes "$MACHINES" --node-rank "$RANK" --nproc-per-node "$PER_NODE" \
    --master-addr "$MAIN" --master-port "$PORT" $SCRIPT
