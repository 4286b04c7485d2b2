#!/usr/bin/env bash
# Every check of the repository: linter, formatter, type checker, all tests (including slow ones).
# Arguments go to pytest: ./scripts/test.sh -m 'not slow' tests/models
# With --newest as the first one: the tests in .venv-newest, with the newest releases of JAX and
# everything else, to which each call upgrades it: PYTHON=python3.13 ./scripts/test.sh --newest
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv packages=--tests
if [[ "${1:-}" == --newest ]]; then
  venv=.venv-newest packages=--newest
  shift
fi
./scripts/setup.sh "$packages"
unset PYTHONPATH PYTHONHOME # as in setup.sh
unset PYTHONDONTWRITEBYTECODE   # hundreds of processes import what the first one compiles

failed=()
check() {
  echo "== $*"
  "$venv/bin/python" -m "$@" || failed+=("$*")
}
check ruff check .
check ruff format --check .
# In parallel with the tests, which leave it a core while they start.
types="$(mktemp)"
"$venv/bin/python" -m mypy >"$types" 2>&1 &
mypy=$!
# One process more than cores, which waits (see tests/conftest.py). Ordered by name: xdist
# would put files with few long tests last, and leave a core idle.
check pytest -n "$(($("$venv/bin/python" -c 'import os; print(len(os.sched_getaffinity(0)))') + 1))" --no-loadscope-reorder "$@"

wait "$mypy" || {
  cat "$types" >&2
  failed+=(mypy)
}
rm -f "$types"

# pytest's summary is the last line on stdout; failures of other checks are reported after it.
if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi
