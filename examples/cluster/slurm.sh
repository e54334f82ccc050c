#!/bin/bash
# A run of verl on Slurm: one Ray of all nodes of the allocation, the driver on the first.
#
#   sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh \
#       algorithm.adv_estimator=grpo data.train_files=/shared/gsm8k/train.parquet ... \
#       trainer.default_local_dir=/shared/runs/first
#
# Arguments are those of `verl.trainer.main_ppo`; TRAINER=verl.trainer.sft_trainer (or another) runs that instead. Submit
# it from a folder in which `python3` has verl: activate the environment before, Slurm passes it on. In a container:
#   INSIDE="apptainer exec --nv --bind /shared /shared/verl.sif" sbatch ...          Apptainer
#   SRUN_OPTIONS="--container-image=/shared/verl.sqsh --container-mounts=/shared:/shared" sbatch ...     pyxis
# Five minutes before its time ends the driver is told to save and stop; the same command goes on from there.
#SBATCH --job-name=verl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
set -euo pipefail

port=${RAY_PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RAY_ADDRESS="${nodes[0]}:$port"
read -ra options <<<"${SRUN_OPTIONS:-}"
read -ra inside <<<"${INSIDE:-}"

on() { # NODE COMMAND...: run it there, in the container if there is one
    local node=$1
    shift
    exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "${options[@]}" "${inside[@]}" "$@"
}

# Ray's processes know each other by a token. It is handed to all of them, whether or not they share a home.
RAY_AUTH_TOKEN=$(python3 -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

on "${nodes[0]}" ray start --head --node-ip-address="${nodes[0]}" --port="$port" --block &
for node in "${nodes[@]:1}"; do
    on "$node" bash -c "until ray start --address=$RAY_ADDRESS --block; do sleep 2; done" &
done

(on "${nodes[0]}" python3 - "${#nodes[@]}") <<'PYTHON'
import sys
import time

import ray

started = time.monotonic()
while True:
    try:
        ray.init(logging_level="error")
        break
    except ConnectionError:
        if time.monotonic() - started > 300:
            sys.exit("Ray's head did not start within 300 s: see the lines of `ray start` above.")
        time.sleep(2)
while (alive := sum(node["Alive"] for node in ray.nodes())) < int(sys.argv[1]):
    if time.monotonic() - started > 300:
        sys.exit(f"{alive} of {sys.argv[1]} nodes joined Ray within 300 s: see the lines of `ray start` above.")
    time.sleep(2)
PYTHON

on "${nodes[0]}" python3 -m "${TRAINER:-verl.trainer.main_ppo}" trainer.nnodes="${#nodes[@]}" \
    trainer.n_gpus_per_node="${SLURM_GPUS_ON_NODE:-8}" "$@" &
driver=$!
trap 'kill -TERM "$driver"' TERM
status=0
wait "$driver" || status=$?
while kill -0 "$driver" 2>/dev/null; do # a trap ends `wait` before the driver has saved
    status=0
    wait "$driver" || status=$?
done
mapfile -t others < <(jobs -p)
kill "${others[@]}" 2>/dev/null || true # Ray on all nodes
wait || true
exit "$status"
