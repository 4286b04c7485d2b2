#!/usr/bin/env bash
# What scripts/tpu_pod.sh does on a worker of the slice; it calls this file there, over ssh.
set -euo pipefail

program="worker $(hostname)"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
venv="$HOME/vit_jax_venv"
lock="$HOME/vit_jax.lock"
log="$HOME/vit_jax.log"
# shellcheck source-path=SCRIPTDIR source=shell.sh
source "$root/scripts/launchers/shell.sh"

is_running() { ! flock -n "$lock" true; }

refuse_if_running() {
  if is_running; then
    fail "a run is going on (process $(cat "$lock")); stop it first, or follow it with logs."
  fi
}

# Python 3.12 if it is there, else another tested one, else 3.12 from uv (the machines' own is 3.10).
make_venv() {
  local candidate
  # Python alone is what an interrupted installation leaves.
  if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
  rm -rf "$venv"
  for candidate in python3.12 python3.13 python3.11; do
    if command -v "$candidate" >/dev/null && "$candidate" -c "import ensurepip" 2>/dev/null; then
      "$candidate" -m venv "$venv"
      return
    fi
  done
  python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --seed --python 3.12 "$venv"
}

# install EXTRAS: moves the unpacked checkout to its place and installs it with the tested versions.
install() {
  refuse_if_running
  rm -rf "$HOME/vit_jax"
  mv "$root" "$HOME/vit_jax"
  cd "$HOME/vit_jax"
  make_venv
  "$venv/bin/python" -m pip install --quiet -c constraints.txt 'setuptools>=77'
  "$venv/bin/python" -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[$1]"
  "$venv/bin/python" -c 'import jax, vit_jax; print("installed, jax", jax.__version__)'
}

# mount_bucket BUCKET FOLDER. Mounted by root, so that FOLDER cannot be written to while it is not
# mounted (after a reboot): a run would begin anew there.
mount_bucket() {
  if mountpoint -q "$2"; then
    say "$2 is mounted"
    return
  fi
  command -v gcsfuse >/dev/null || sudo apt-get -o DPkg::Lock::Timeout=300 install --yes --quiet gcsfuse >/dev/null ||
    fail "gcsfuse is not installed and apt does not have it: install it (Cloud Storage FUSE's manual) with tpu_pod.sh ssh."
  sudo mkdir -p "$2"
  # No caching of what exists: processes wait for each other's files. Checkpoints are written under
  # a preliminary name and renamed.
  sudo gcsfuse -o allow_other --uid="$(id -u)" --gid="$(id -g)" --implicit-dirs \
    --metadata-cache-ttl-secs=0 --rename-dir-limit=1000000 "$1" "$2"
}

# mount_nfs SERVER:/SHARE FOLDER
mount_nfs() {
  if mountpoint -q "$2"; then
    say "$2 is mounted"
    return
  fi
  command -v mount.nfs >/dev/null || sudo apt-get -o DPkg::Lock::Timeout=300 install --yes --quiet nfs-common >/dev/null
  sudo mkdir -p "$2"
  sudo mount -t nfs -o hard,actimeo=1 "$1" "$2"
  [[ -w "$2" ]] ||
    fail "$1 is not writable for $(id -un); change that once with: tpu_pod.sh ssh ... -- sudo chmod 1777 $2"
}

# start [KEY=VALUE...] -- SCRIPT FLAG...: in the background, restarted when it asks for it.
start() {
  local environment=()
  while [[ "$1" != -- ]]; do
    environment+=("$1")
    shift
  done
  shift
  refuse_if_running
  cd "$root"
  [[ ! -e "$log" ]] || mv -f "$log" "$log.previous"
  # JAX's own choice, 8482, is not among the ports that Google's rules for several slices open.
  setsid nohup bash scripts/restart.sh --lock="$lock" \
    env JAX_COORDINATOR_PORT=8476 ${environment[@]+"${environment[@]}"} "$venv/bin/python" "$@" >"$log" 2>&1 </dev/null &
  say "started; log: $log"
}

# stop [--kill]: SIGTERM makes the run save and end; waits for that.
stop() {
  local pid
  if ! is_running; then
    say "nothing is running"
    return
  fi
  pid="$(cat "$lock")"
  if [[ "${1:-}" == --kill ]]; then
    kill -KILL -- "-$pid" || true # the session that `start` made, all of its processes
  else
    kill -TERM "$pid" || true
  fi
  SECONDS=0
  while is_running; do
    ((SECONDS < 600)) ||
      fail "process $pid is still running after $SECONDS s; --kill ends it without saving."
    sleep 0.2
  done
  say "stopped"
}

status() {
  local state=idle
  if is_running; then state="running (process $(cat "$lock"))"; fi
  echo "$program: $state; $([[ -e "$log" ]] && tail -n 1 "$log" || echo no log)"
}

follow() {
  tail -n 100 -F "$log" | sed -u "s/^/[$(hostname)] /"
}

"$@"
