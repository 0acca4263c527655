#!/bin/bash
#SBATCH --job-name=hf-parallel
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# One task a node, which starts the processes of its node. FILE, SCRIPT and PER_NODE may be set outside.
set -euo pipefail
export FILE=${FILE:-mine.yaml} SCRIPT=${SCRIPT:-train.py} PER_NODE=${PER_NODE:-8}
MAIN=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((20000 + SLURM_JOB_ID % 20000))
export MAIN PORT
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c 'hf-parallel doctor --peers "$FILE" --num-machines "$SLURM_NNODES" \
    --machine-rank "$SLURM_PROCID" --main-process-ip "$MAIN" --main-process-port "$PORT"'
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c 'accelerate launch --config_file "$FILE" \
    --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * PER_NODE))" --machine_rank "$SLURM_PROCID" \
    --main_process_ip "$MAIN" --main_process_port "$PORT" $SCRIPT'
