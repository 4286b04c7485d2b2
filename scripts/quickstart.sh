#!/usr/bin/env bash
# Sets up the environment, then: ./scripts/quickstart.sh [WORKDIR] pre-trains a small ViT on bundled
# data, fine-tunes it on handwritten digits and compares. Interrupted, the same command resumes.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if (($# > 1)) || [[ "${1:-}" == -* ]]; then
  echo "usage: ./scripts/quickstart.sh [WORKDIR]   (default: $root/runs/quickstart)" >&2
  [[ "${1:-}" == -h || "${1:-}" == --help ]] && exit 0
  exit 2
fi
workdir="$(realpath -m -- "${1:-$root/runs/quickstart}")"
"$root/scripts/setup.sh"
unset PYTHONPATH PYTHONHOME # as in setup.sh
exec "$root/.venv/bin/python" "$root/scripts/quickstart.py" --workdir="$workdir"
