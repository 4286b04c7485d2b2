#!/usr/bin/env bash
# Runs a training command and runs it again when it asks for it:
#
#   scripts/restart.sh [--lock=FILE] [--max_restarts=100] [--delay_seconds=10] COMMAND...
#
# Status 75 means: saved after SIGTERM, another process of the run died, or the shared disk had an
# I/O error; the same command resumes. It is run again then, and after a crash (a signal other than
# Ctrl-C's and SIGTERM), but not after success (0), a diverged loss (1) or a mistake (2). The first
# SIGTERM or Ctrl-C is passed on as SIGTERM, so that the run saves, and later ones are not; it is not
# run again after that. --lock holds FILE while the command lives and refuses to start where it is
# held; it contains this script's process id.
set -euo pipefail

program=restart
max_restarts=100
delay_seconds=10
lock=""
child=""
stopping=""
forwarded=""
interrupted=""

say() { echo "$program: $*" >&2; }
die() {
  say "error: $*"
  exit 2
}

# Once: the run is saving after that.
forward() {
  [[ -n "$stopping" && -n "$child" && -z "$forwarded" ]] || return 0
  forwarded=1
  kill -TERM "$child" 2>/dev/null || true
}

# shellcheck disable=SC2317,SC2329  # called by the trap
pass_on() {
  interrupted=1
  stopping=1
  forward
}

# Runs the command once and sets `code`.
run_once() {
  "$@" &
  child=$!
  forward # a signal that came while there was no `child` yet
  code=0
  while :; do
    # A signal ends `wait` before the command has ended; its status is then still to come.
    interrupted=""
    wait "$child" && code=0 || code=$?
    [[ -n "$interrupted" ]] || break
  done
  child=""
}

should_restart() {
  ((code == 75 || (code > 128 && code != 130 && code != 143)))
}

while (($#)); do
  case "$1" in
    --lock=*) lock="${1#*=}" ;;
    --max_restarts=*) max_restarts="${1#*=}" ;;
    --delay_seconds=*) delay_seconds="${1#*=}" ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    -*) die "unknown flag '$1'; known: --lock, --max_restarts, --delay_seconds, --help" ;;
    *) break ;;
  esac
  shift
done
(($#)) || die "the command is missing; see --help."
[[ "$max_restarts" =~ ^[0-9]+$ ]] || die "--max_restarts=$max_restarts is no number."
[[ "$delay_seconds" =~ ^[0-9]+$ ]] || die "--delay_seconds=$delay_seconds is no number."

if [[ -n "$lock" ]]; then
  # Not truncated before it is ours. Every process of the run inherits it: held while any lives.
  [[ -d "$(dirname "$lock")" ]] || die "--lock=$lock: there is no folder $(dirname "$lock")."
  exec 9>>"$lock"
  flock -n 9 || die "--lock=$lock is held: a run is going on (process $(cat "$lock"))."
  echo $$ >"$lock"
fi
trap pass_on TERM INT

restarts=0
while :; do
  run_once "$@"
  should_restart || break
  if [[ -n "$stopping" ]]; then
    say "stopped with status $code; the same command resumes from the last checkpoint."
    break
  elif ((restarts >= max_restarts)); then
    say "status $code, and --max_restarts=$max_restarts is used up."
    break
  fi
  restarts=$((restarts + 1))
  say "status $code: restart $restarts of $max_restarts in $delay_seconds s"
  # In the background: `wait` returns at a signal, sleep would not. The lock is not sleep's.
  sleep "$delay_seconds" 9>&- &
  wait $! || true
  [[ -z "$stopping" ]] || break
done
say "ended with status $code"
exit "$code"
