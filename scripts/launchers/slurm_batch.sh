#!/usr/bin/env bash
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# The batch script that scripts/slurm.sh submits; it runs on the first node of the job:
#
#   slurm_batch.sh [--dry_run] --log_dir=DIR [--max_requeues=100] -- COMMAND...
#
# Starts COMMAND as every task of the job. SLURM copies this file elsewhere, so that it reads no
# other. Status 75 of any task (saved at SIGTERM, a task died, or the shared disk had an I/O error)
# queues the same job again; 1 (a diverged loss) and 2 (a mistake) do not.
set -euo pipefail

dry_run="" log_dir="" max_requeues=100
say() { echo "slurm_batch: $*" >&2; }

# run COMMAND...: or prints it.
run() {
  if [[ -z "$dry_run" ]]; then
    "$@"
  else
    printf '%q' "$1"
    printf ' %q' "${@:2}"
    echo
  fi
}

while [[ "${1:-}" != -- ]]; do
  case "${1:-}" in
    --dry_run) dry_run=1 ;;
    --log_dir=*) log_dir="${1#*=}" ;;
    --max_requeues=*) max_requeues="${1#*=}" ;;
    "")
      say "error: the command is missing; give it after --."
      exit 2
      ;;
    *)
      say "error: unexpected '$1'; known: --dry_run, --log_dir, --max_requeues; the command comes after --."
      exit 2
      ;;
  esac
  shift
done
shift
(($#)) || { say "error: the command is missing; give it after --." && exit 2; }
[[ -n "$log_dir" ]] || { say "error: --log_dir is missing." && exit 2; }

job="${SLURM_JOB_ID:-JOB}"
# srun has not inherited --cpus-per-task since SLURM 22.05.
flags=(--cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
# Each task sees all GPUs of its node and takes the one of its number.
if [[ -n "${SLURM_GPUS_PER_NODE:-}" ]]; then
  flags+=(--gpu-bind=none)
  # A JAX without CUDA would train on the CPUs.
  export JAX_PLATFORMS="${JAX_PLATFORMS:-cuda,cpu}"
fi
# The other tasks end by themselves when one dies, after saving what they can; --wait is the limit.
flags+=(--kill-on-bad-exit=0 --wait=600)
flags+=(--open-mode=append --output="$log_dir/$job.%t.log")

code=0
run srun "${flags[@]}" "$@" || code=$?
[[ -n "$dry_run" ]] || say "job $job: status $code"
# srun's status is the largest of its tasks': 75 hides a 1 or a 2, so that requeues are counted.
# Above 128: a task was killed (out of memory, a lost node) and nobody saved; the run resumes from
# the checkpoint before.
if ((code == 75 || (code > 128 && code != 130))) || [[ -n "$dry_run" ]]; then
  if ((${SLURM_RESTART_COUNT:-0} >= max_requeues)); then
    say "job $job: --max_requeues=$max_requeues is used up."
    exit "$code"
  fi
  run scontrol requeue "$job"
  exit 0
fi
exit "$code"
