#!/usr/bin/env bash
# Trains on a slice of Cloud TPUs, with gcloud:
#
#   scripts/tpu_pod.sh create NAME ZONE TYPE VERSION [FLAGS OF GCLOUD]   requests a slice
#   scripts/tpu_pod.sh status NAME ZONE       its state: ACTIVE when ready
#   scripts/tpu_pod.sh install NAME ZONE      copies the commit checked out here to all workers
#   scripts/tpu_pod.sh run NAME ZONE TRAINING FLAGS   starts on all workers; restarts on status 75
#   scripts/tpu_pod.sh logs NAME ZONE         follows the log of worker 0
#   scripts/tpu_pod.sh stop NAME ZONE         the run saves and ends
#   scripts/tpu_pod.sh ssh NAME ZONE COMMAND  runs a command on all workers
#   scripts/tpu_pod.sh delete NAME ZONE       deletes the slice: billing ends here
#
# DRY_RUN=1 prints the commands and runs none. A walkthrough: docs/pods.md.
set -euo pipefail

die() {
  echo "tpu_pod: error: $*" >&2
  exit 2
}

run() {
  if [[ -z "${DRY_RUN:-}" ]]; then
    "$@"
  else
    (PS4="" && set -x && : "$@") 2>&1 | sed 's/^: //' # quoted for a shell
  fi
}

queued() { run gcloud compute tpus queued-resources "$1" "$name" --zone="$zone" "${@:2}"; }

# on_workers WORKER COMMAND: a number or all; runs in bash in the home folder.
on_workers() {
  run gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker="$1" --command="$2"
}

case "${1:-}" in
  -h | --help) exec sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}" ;;
esac
(($# >= 3)) || die "give a command, the slice's name and its zone; see --help."
command="$1" name="$2" zone="$3"
shift 3
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# For the workers' shells.
is_running="pkill -0 -F vit_jax.pid 2>/dev/null"
refuse="if $is_running; then echo 'a run is going on; stop it first'; exit 1; fi"
python="python3 -m pip install -q --user uv && python3 -m uv python install -q 3.12"
python="$python && export PYTHON=\$(python3 -m uv python find 3.12)"
install=".venv/bin/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[gcs,tpu]'"

case "$command" in
  create)
    (($# >= 2)) || die "TYPE and VERSION are missing, as v5litepod-16 v2-alpha-tpuv5-lite."
    queued create --node-id="$name" --accelerator-type="$1" --runtime-version="$2" "${@:3}"
    ;;
  status) queued describe --format="value(state.state)" ;;
  install)
    [[ -z "$(git status --porcelain)" ]] || die "$PWD has uncommitted changes; commit them first."
    scratch="$(mktemp -d)"
    trap 'rm -rf "$scratch"' EXIT
    # With enough of .git for a run to record its commit.
    run git clone --quiet --depth=1 "file://$PWD" "$scratch/vit_jax"
    run tar -czf "$scratch/vit_jax.tar.gz" -C "$scratch" vit_jax
    run gcloud compute tpus tpu-vm scp "$scratch/vit_jax.tar.gz" "$name:" --zone="$zone" --worker=all
    on_workers all "$refuse; rm -rf vit_jax && tar -xzf vit_jax.tar.gz && $python && cd vit_jax &&
      scripts/setup.sh && $install"
    ;;
  run)
    (($#)) || die "the training flags are missing, as in: --config=... --workdir=gs://..."
    printf -v flags ' %q' "$@"
    train="JAX_PLATFORMS=tpu,cpu setsid nohup scripts/restart.sh .venv/bin/python scripts/train.py"
    on_workers all "$refuse; cd vit_jax || exit; $train$flags >>../vit_jax.log 2>&1 </dev/null &
      echo \$! >../vit_jax.pid"
    ;;
  logs) on_workers 0 "tail -n 100 -F vit_jax.log" ;;
  stop) on_workers all "pkill -TERM -F vit_jax.pid; while $is_running; do sleep 1; done" ;;
  ssh) on_workers all "$(printf '%q ' "$@")" ;;
  delete) queued delete --force ;;
  *) die "unknown command '$command'; see --help." ;;
esac
