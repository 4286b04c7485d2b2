#!/usr/bin/env bash
# Trains on Cloud TPU: creates a slice (or several), installs this checkout on every worker, mounts
# a shared folder and runs the same training command on all of them.
#
#   scripts/tpu_pod.sh COMMAND --name=NAME --zone=ZONE [FLAGS] [-- TRAINING FLAGS]
#
#   up       create, install, mount (with --bucket or --nfs), run
#   create   asks for the slice as a queued resource and waits until it is there
#              --accelerator=v5e-256   v2, v3, v4, v5p: cores; v5e, v6e: chips
#              --spot | --reserved     on demand without either
#              --runtime_version=...   (default: the one for JAX on that generation)
#              --create_flag=...       one more flag for gcloud; may be repeated
#              --poll_seconds=30
#   install  copies the commit that is checked out here to all workers and installs it
#              --dirty                 with uncommitted changes (refused otherwise)
#              --extras=tpu            extras of setup.py
#   mount    a folder that all workers share, for --workdir and the data
#              --bucket=NAME           of Cloud Storage, through gcsfuse
#              --nfs=SERVER:/SHARE     Filestore or any NFS server
#              --folder=/mnt/work      where it appears; --workdir must be in it
#              --mounted               (up, in place of both) it is there already
#   run      starts training on all workers in the background; again on status 75
#              --script=scripts/train.py
#              --env=KEY=VALUE         for the process; may be repeated
#   logs     follows the log of worker 0; --worker=all follows all
#   status   of the slice and of the run on each worker
#   stop     SIGTERM: the run saves and ends; --kill ends it at once
#   ssh      runs the command after -- on all workers
#   delete   gives the slice back; asks, unless --yes
#
# For all commands: --project=..., --slices=N (N of them as one run), --ssh_flag=... (one more flag
# for gcloud's ssh and scp, as --ssh_flag=--internal-ip; may be repeated), --dry_run (prints every
# command and runs none). What it needs and a walk through it: docs/launch.md.
set -euo pipefail

program=tpu_pod
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source-path=SCRIPTDIR source=launchers/shell.sh
source "$root/scripts/launchers/shell.sh"
# shellcheck source-path=SCRIPTDIR source=launchers/tpu_types.sh
source "$root/scripts/launchers/tpu_types.sh"

known="up, create, install, mount, run, logs, status, stop, ssh, delete"
name="" zone="" slices=1 accelerator="" runtime="" capacity="" poll_seconds=30
dirty="" extras=tpu bucket="" nfs="" mounted="" folder=/mnt/work script=scripts/train.py
worker=0 kill="" yes=""
create_flags=() ssh_flags=() environment=() rest=()
place=() # --zone and --project

parse_flags() {
  while (($#)); do
    check_has_value "$1"
    case "$1" in
      --name=*) name="${1#*=}" ;;
      --zone=*) zone="${1#*=}" && place+=("$1") ;;
      --project=*) place+=("$1") ;;
      --slices=*) slices="${1#*=}" ;;
      --accelerator=*) accelerator="${1#*=}" ;;
      --runtime_version=*) runtime="${1#*=}" ;;
      --spot | --reserved)
        [[ -z "$capacity" ]] || die "$capacity and $1 exclude each other."
        capacity="$1"
        ;;
      --create_flag=*) create_flags+=("${1#*=}") ;;
      --ssh_flag=*) ssh_flags+=("${1#*=}") ;;
      --poll_seconds=*) poll_seconds="${1#*=}" ;;
      --dirty) dirty=--dirty ;;
      --extras=*) extras="${1#*=}" ;;
      --bucket=*) bucket="${1#*=}" && bucket="${bucket#gs://}" ;;
      --nfs=*) nfs="${1#*=}" ;;
      --mounted) mounted=1 ;;
      --folder=*) folder="${1#*=}" && folder="${folder%/}" ;;
      --script=*) script="${1#*=}" ;;
      --env=*) environment+=("${1#*=}") ;;
      --worker=*) worker="${1#*=}" ;;
      --kill) kill=--kill ;;
      --yes) yes=1 ;;
      --dry_run) dry_run=1 program="tpu_pod (dry run)" ;;
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

# Everything that can be said before anything is asked of Google.
check_flags() {
  local pair
  check_name "$name"
  [[ -n "$zone" ]] || die "--zone is missing, as in --zone=us-central2-b."
  check_number --slices "$slices"
  [[ "$poll_seconds" =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "--poll_seconds=$poll_seconds is no number."
  [[ "$worker" == all || "$worker" =~ ^[0-9]+$ ]] || die "--worker=$worker must be a number or all."
  [[ "$folder" == /* ]] || die "--folder=$folder must be a path from / on."
  [[ -z "$bucket" ]] || check_bucket "$bucket"
  [[ -z "$bucket" || -z "$nfs" ]] || die "--bucket and --nfs exclude each other."
  [[ -z "$nfs" || "$nfs" == *:/* ]] || die "--nfs=$nfs must be SERVER:/SHARE."
  for pair in ${environment[@]+"${environment[@]}"}; do
    [[ "$pair" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || die "--env=$pair must be KEY=VALUE."
  done
  case "$1" in
    up | create)
      [[ -n "$accelerator" ]] || die "--accelerator is missing, as in --accelerator=v5e-16."
      tpu_type "$accelerator"
      case "$generation" in
        v2 | v3) ((slices == 1)) || die "--slices=$slices: slices of TPU $generation cannot be joined." ;;
      esac
      ;;
    mount) [[ -n "$bucket$nfs" ]] || die "--bucket or --nfs is missing." ;;
    ssh) ((${#rest[@]})) || die "the command is missing; give it after --." ;;
  esac
  case "$1" in
    up | run)
      [[ -f "$root/$script" ]] || die "--script=$script does not exist in $root."
      training_command "$script" ${rest[@]+"${rest[@]}"}
      [[ "$workdir" == /* || "$workdir" == gs://* ]] ||
        die "--workdir=$workdir must be gs://BUCKET/FOLDER, or a path from / on, in a folder that all workers share; see docs/launch.md."
      [[ "$workdir" != gs://* || ",$extras," == *,gcs,* ]] || extras+=,gcs
      check_recipe "$root"
      ;;
  esac
  if [[ "${workdir:-}" == gs://* ]]; then
    : # which all workers reach
  elif [[ -n "$bucket$nfs" && -n "${workdir:-}" ]]; then
    [[ "$workdir" == "$folder"/* ]] ||
      die "--workdir=$workdir must be in --folder=$folder, which the workers share."
  elif [[ "$1" == up && -z "$mounted" ]]; then
    ((hosts * slices == 1)) ||
      die "--workdir=gs://BUCKET/FOLDER, --bucket or --nfs is missing: the $((hosts * slices)) workers share no folder (--mounted if they do)."
  fi
  case "$1" in
    up | install)
      check_extras
      check_checkout
      ;;
  esac
}

check_extras() {
  local extra
  for extra in ${extras//,/ }; do
    grep -q "^ *\"$extra\": " "$root/setup.py" || die "--extras=$extras: setup.py has no extra $extra."
  done
}

check_checkout() {
  local changed
  changed="$(git -C "$root" status --porcelain)" || die "$root is no git checkout; install copies a commit."
  [[ -z "$changed" || -n "$dirty" ]] ||
    die "$root has uncommitted changes; commit them, or copy them too with --dirty."
}

# The names of the slices' nodes.
nodes() {
  local index
  if ((slices == 1)); then
    echo "$name"
    return
  fi
  for ((index = 0; index < slices; index++)); do echo "$name-$index"; done
}

tpus() { run gcloud compute tpus "$@" "${place[@]}"; }

# on_workers WORKER COMMAND: on that worker, or all, of every slice at the same time.
on_workers() {
  local node pids=() pid status=0
  if [[ -n "$dry_run" || "$slices" == 1 ]]; then
    for node in $(nodes); do ssh_to "$node" "$@" </dev/null || status=$?; done
    return "$status"
  fi
  # Programs in the background do not hear Ctrl-C.
  trap 'kill ${pids[@]+"${pids[@]}"} 2>/dev/null; exit 130' INT TERM
  for node in $(nodes); do
    ssh_to "$node" "$@" </dev/null &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  trap - INT TERM
  return "$status"
}

ssh_to() {
  tpus tpu-vm ssh "$1" --worker="$2" --command="$3" ${ssh_flags[@]+"${ssh_flags[@]}"}
}

# worker_script WORKER FUNCTION ARGUMENT...: of launchers/tpu_worker.sh, there.
worker_script() {
  local where="$1"
  shift
  on_workers "$where" "bash vit_jax/scripts/launchers/tpu_worker.sh $(quote_all "$@")"
}

state() {
  gcloud compute tpus queued-resources describe "$name" --format='value(state.state)' "${place[@]}"
}

create() {
  local node_flags=(--node-id="$name") found=""
  ((slices == 1)) || node_flags=(--node-count="$slices" --node-prefix="$name")
  say "$slices x $accelerator: topology $topology, $hosts workers of $chips_per_host chips"
  [[ -n "$dry_run" ]] || found="$(state 2>/dev/null)" || true
  if [[ -n "$found" ]]; then
    say "$name is there already: $found"
  else
    tpus queued-resources create "$name" "${node_flags[@]}" --accelerator-type="$cloud_type" \
      --runtime-version="${runtime:-$runtime_version}" ${capacity:+"$capacity"} \
      ${create_flags[@]+"${create_flags[@]}"} ||
      fail "gcloud refused to create $name (--accelerator=$accelerator, --zone=$zone); its message is above."
  fi
  wait_until_active
}

wait_until_active() {
  local found previous="" failures=0
  if [[ -n "$dry_run" ]]; then
    tpus queued-resources describe "$name" --format='value(state.state)'
    return
  fi
  SECONDS=0
  while :; do
    if found="$(state)"; then
      failures=0
    else
      failures=$((failures + 1))
      ((failures < 5)) || fail "gcloud cannot describe $name; its message is above."
      found="unknown"
    fi
    [[ "$found" == "$previous" ]] || say "$name: $found after $((SECONDS / 60)) min"
    previous="$found"
    case "$found" in
      ACTIVE) return ;;
      FAILED) fail "$name: $(failure); delete it, then try another --zone, --accelerator or --spot." ;;
      SUSPENDING | SUSPENDED) fail "$name was preempted ($found); delete it, then create it again." ;;
      DELETING) fail "$name is being deleted." ;;
    esac
    sleep "$poll_seconds"
  done
}

failure() {
  local message
  message="$(gcloud compute tpus queued-resources describe "$name" \
    --format='value(state.failedData.error.message)' "${place[@]}")" || true
  echo "${message:-FAILED without a reason (often: no capacity)}"
}

install() {
  local node commit archive
  commit="$(git -C "$root" rev-parse --short=12 HEAD)"
  # With the slice's name: another `up` may be packing the same commit.
  archive="${XDG_CACHE_HOME:-$HOME/.cache}/vit_jax/launch/$name-$commit${dirty:+-dirty}.tar.gz"
  say "installing ${commit}${dirty:+ with uncommitted changes} on all workers"
  run bash "$root/scripts/launchers/pack.sh" ${dirty:+"$dirty"} "$archive"
  for node in $(nodes); do
    tpus tpu-vm scp "$archive" "$node:vit_jax.tar.gz" --worker=all \
      ${ssh_flags[@]+"${ssh_flags[@]}"} ||
      fail "copying to $node failed. If it is for want of a key in ssh-agent: ssh-add ~/.ssh/google_compute_engine"
  done
  on_workers all "rm -rf vit_jax.new && mkdir vit_jax.new && tar -xzf vit_jax.tar.gz -C vit_jax.new && bash vit_jax.new/scripts/launchers/tpu_worker.sh install $(quote "$extras")" ||
    fail "installing failed on a worker; its message is above."
  run rm -f "$archive"
}

mount_folder() {
  if [[ -n "$bucket" ]]; then
    worker_script all mount_bucket "$bucket" "$folder"
  else
    worker_script all mount_nfs "$nfs" "$folder"
  fi || fail "mounting on $folder failed on a worker; its message is above."
}

start() {
  # First on all, so that no worker starts a run that another one refuses.
  worker_script all refuse_if_running || fail "nothing was started."
  worker_script all start ${environment[@]+"${environment[@]}"} -- "${training[@]}" ||
    fail "not all workers started; stop, then run again."
  say "started on all workers; scripts/tpu_pod.sh logs --name=$name --zone=$zone follows worker 0"
}

status() {
  tpus queued-resources describe "$name" --format='value(state.state)'
  worker_script all status
}

delete() {
  if [[ -z "$yes$dry_run" ]]; then
    confirm "Delete $name ($slices slice(s) in $zone) and stop what runs there?" ||
      fail "$name was not deleted."
  fi
  # --force: with its nodes.
  tpus queued-resources delete "$name" --force --quiet
}

main() {
  local command="${1:-}"
  case "$command" in
    -h | --help)
      show_help "${BASH_SOURCE[0]}"
      return
      ;;
    up | create | install | mount | run | logs | status | stop | ssh | delete) shift ;;
    *) die "unknown command '$command'; known: $known; see --help." ;;
  esac
  parse_flags "$@"
  check_flags "$command"
  case "$command" in
    up)
      create
      install
      [[ -z "$bucket$nfs" ]] || mount_folder
      start
      ;;
    mount) mount_folder ;;
    run) start ;;
    logs) worker_script "$worker" follow ;;
    stop) worker_script all stop ${kill:+"$kill"} ;;
    ssh) on_workers all "$(quote_all "${rest[@]}")" ;;
    *) "$command" ;;
  esac
}

main "$@"
