#!/usr/bin/env bash
# Submits a training run to SLURM: one process per GPU, saved shortly before the time limit, queued
# again until it has finished.
#
#   scripts/slurm.sh --name=NAME --nodes=N --gpus_per_node=8 --time=24:00:00 [FLAGS] -- TRAINING FLAGS
#
#   --nodes=1  --gpus_per_node=8      0 GPUs: one process per node, on its CPUs
#   --cpus_per_task=8                 for each process's data loader
#   --time=D-HH:MM:SS                 limit of one stretch of the run (default: the partition's)
#   --partition=...  --account=...
#   --sbatch_flag=...                 one more flag for sbatch; may be repeated
#   --script=scripts/train.py         of this checkout
#   --python=.venv/bin/python         of this checkout; scripts/setup.sh makes it
#   --log_dir=runs/slurm              JOB.batch.log, and JOB.TASK.log for each process
#   --max_requeues=100
#   --dry_run                         prints the commands and runs none
#
# A process per GPU is what JAX's own detection of SLURM means: it gives each task the one GPU of
# its number on the node. The launchers/slurm_batch.sh that is submitted can be given to sbatch by
# hand, too. More: docs/launch.md.
set -euo pipefail

program=slurm
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source-path=SCRIPTDIR source=launchers/shell.sh
source "$root/scripts/launchers/shell.sh"

name="" nodes=1 gpus_per_node=8 cpus_per_task=8 script=scripts/train.py python="$root/.venv/bin/python"
log_dir=runs/slurm max_requeues=100
sbatch_flags=() rest=()

parse_flags() {
  while (($#)); do
    check_has_value "$1"
    case "$1" in
      --name=*) name="${1#*=}" ;;
      --nodes=*) nodes="${1#*=}" ;;
      --gpus_per_node=*) gpus_per_node="${1#*=}" ;;
      --cpus_per_task=*) cpus_per_task="${1#*=}" ;;
      --time=* | --partition=* | --account=*) sbatch_flags+=("$1") ;;
      --sbatch_flag=*) sbatch_flags+=("${1#*=}") ;;
      --script=*) script="${1#*=}" ;;
      --python=*) python="${1#*=}" ;;
      --log_dir=*) log_dir="${1#*=}" ;;
      --max_requeues=*) max_requeues="${1#*=}" ;;
      --dry_run) dry_run=1 ;;
      -h | --help)
        show_help "${BASH_SOURCE[0]}"
        exit
        ;;
      --)
        shift
        rest=("$@")
        return
        ;;
      *) die "unknown flag '$1'; --help lists the flags, training flags come after --." ;;
    esac
    shift
  done
}

check_flags() {
  check_name "$name"
  check_number --nodes "$nodes"
  check_number --cpus_per_task "$cpus_per_task"
  check_number --max_requeues "$max_requeues"
  [[ "$gpus_per_node" == 0 ]] || check_number --gpus_per_node "$gpus_per_node"
  [[ -n "$dry_run" || -x "$python" ]] ||
    die "--python=$python is no program; run scripts/setup.sh, or name the interpreter."
  [[ "$script" == /* ]] || script="$root/$script"
  [[ -f "$script" ]] || die "--script=$script does not exist."
  training_command "$script" ${rest[@]+"${rest[@]}"}
  check_recipe "$PWD"
  [[ "$log_dir" == /* ]] || log_dir="$PWD/$log_dir"
  case "$log_dir" in *%*) die "--log_dir=$log_dir: SLURM replaces % in file names." ;; esac
}

main() {
  local gpu_flags=() tasks_per_node=1 batch="$root/scripts/launchers/slurm_batch.sh"
  parse_flags "$@"
  check_flags
  if ((gpus_per_node > 0)); then
    gpu_flags=(--gpus-per-node="$gpus_per_node")
    tasks_per_node="$gpus_per_node"
  fi
  # sbatch does not make the folder, and a job that cannot write its log ends without a word.
  run mkdir -p "$log_dir"
  # Without `B:` the signal goes to the processes, not to the batch script.
  run sbatch --job-name="$name" --nodes="$nodes" --ntasks-per-node="$tasks_per_node" \
    ${gpu_flags[@]+"${gpu_flags[@]}"} --cpus-per-task="$cpus_per_task" --signal=TERM@120 --requeue \
    --open-mode=append --output="$log_dir/%j.batch.log" ${sbatch_flags[@]+"${sbatch_flags[@]}"} \
    "$batch" --log_dir="$log_dir" --max_requeues="$max_requeues" -- "$python" "${training[@]}"
  if [[ -n "$dry_run" ]]; then
    SLURM_CPUS_PER_TASK="$cpus_per_task" SLURM_GPUS_PER_NODE="${gpu_flags[*]+$gpus_per_node}" \
      "$batch" --dry_run --log_dir="$log_dir" -- "$python" "${training[@]}"
  fi
}

main "$@"
