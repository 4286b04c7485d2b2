#!/usr/bin/env bash
# Runs a training command, and reruns it as long as that helps:
#
#   scripts/restart.sh [--max_restarts=100] [--delay_seconds=10] COMMAND...
#
# Status 75 means: saved after SIGTERM, another process of the run died, or the shared disk had an
# I/O error; the same command resumes. It is rerun then, and after a crash (a signal other than
# Ctrl-C's and SIGTERM), but not after success (0), a diverged loss (1) or a mistake (2). SIGTERM
# and Ctrl-C are passed on as SIGTERM, so that the run saves; it is not rerun after that.
set -euo pipefail

max_restarts=100 delay_seconds=10
child="" stopping="" interrupted=""

die() {
  echo "restart: error: $*" >&2
  exit 2
}

# The first signal is passed on; then the run saves.
# shellcheck disable=SC2329  # called by the trap
on_signal() {
  interrupted=1
  [[ -z "$stopping" ]] || return 0
  stopping=1
  [[ -z "$child" ]] || kill -TERM "$child" || true
}

while [[ "${1:-}" == -* ]]; do
  case "$1" in
    --max_restarts=*) max_restarts="${1#*=}" ;;
    --delay_seconds=*) delay_seconds="${1#*=}" ;;
    -h | --help) exec sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}" ;;
    *) die "unknown flag '$1'; known: --max_restarts, --delay_seconds, --help" ;;
  esac
  shift
done
(($#)) || die "the command is missing; see --help."
trap on_signal TERM INT

for ((restarts = 1; ; restarts++)); do
  "$@" &
  child=$!
  [[ -z "$stopping" ]] || kill -TERM "$child" || true # it came before `child` was set
  while :; do
    # A signal ends `wait` before the command ends; its status is still to come.
    interrupted="" code=0
    wait "$child" || code=$?
    [[ -n "$interrupted" ]] || break
  done
  child=""
  ((code == 75 || (code > 128 && code != 130 && code != 143))) || break
  [[ -z "$stopping" ]] || break
  ((restarts <= max_restarts)) || break
  echo "restart: status $code: restart $restarts of $max_restarts in $delay_seconds s" >&2
  # In the background: a signal interrupts `wait`, but not sleep.
  sleep "$delay_seconds" &
  wait $! || true
  [[ -z "$stopping" ]] || break
done
echo "restart: ended with status $code" >&2
exit "$code"
