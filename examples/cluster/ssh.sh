#!/bin/bash
# Started on one machine, in a folder that all of them have at the same path; HOSTS names them, machine 0 first.
set -euo pipefail
read -ra HOSTS <<< "${HOSTS:-nodea nodeb}"
FILE=${FILE:-mine.yaml} SCRIPT=${SCRIPT:-train.py} RUNNING=()
for RANK in "${!HOSTS[@]}"; do
    ssh -tt -o BatchMode=yes "${HOSTS[RANK]}" "cd '$PWD' &&
        hf-parallel doctor --peers $FILE --machine-rank $RANK &&
        accelerate launch --config_file $FILE --machine_rank $RANK $SCRIPT" < /dev/null > "machine$RANK.log" 2>&1 &
    RUNNING+=($!)
done
trap 'kill "${RUNNING[@]}" 2> /dev/null || true' EXIT  # -tt: what runs there ends with the connection
for _ in "${RUNNING[@]}"; do wait -n; done
