#!/usr/bin/env bash
#SBATCH --job-name=vit
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# Trains on SLURM; submit it from the folder of your clone, with training flags after its name:
#
#   sbatch --nodes=4 --time=24:00:00 scripts/slurm.sh --config=... --workdir=...
#
# The options above can be given to sbatch instead. One task per GPU, because JAX gives each SLURM
# task the GPU of its number; without GPUs: --gpus-per-node=0 --ntasks-per-node=1. The log of
# process I is slurm-JOB.I.log.
#
# 120 s before the time limit every process gets SIGTERM, saves and exits with status 75. The job
# then requeues itself, as after a crash; a diverged loss (1) and a mistake (2) end it.
# DRY_RUN=1 scripts/slurm.sh ... prints the commands of the job and runs none.
set -euo pipefail

run() {
  if [[ -z "${DRY_RUN:-}" ]]; then
    "$@"
  else
    (PS4="" && set -x && : "$@") 2>&1 | sed 's/^: //' # quoted for a shell
  fi
}

job="${SLURM_JOB_ID:-JOB}"
# srun has not inherited --cpus-per-task since SLURM 22.05. When a task dies, the others end by
# themselves, after saving what they can; --wait is the limit.
flags=(--cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=600)
flags+=(--open-mode=append --output="slurm-$job.%t.log")
if [[ "${SLURM_GPUS_PER_NODE:-0}" != 0 ]]; then
  flags+=(--gpu-bind=none)                                # each task sees all GPUs of its node
  export JAX_PLATFORMS="${JAX_PLATFORMS:-cuda,cpu}" # else a JAX without CUDA falls back to the CPU
fi

code=0
run srun "${flags[@]}" .venv/bin/python scripts/train.py "$@" || code=$?
# srun's status is the largest of its tasks': 75 hides a 1 or a 2, so restarts are counted.
# Above 128: a task was killed (out of memory, a lost node).
if [[ -n "${DRY_RUN:-}" ]] || ((code == 75 || (code > 128 && code != 130))); then
  ((${SLURM_RESTART_COUNT:-0} < 100)) || exit "$code"
  run scontrol requeue "$job"
  exit 0
fi
exit "$code"
