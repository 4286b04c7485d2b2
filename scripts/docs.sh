#!/usr/bin/env bash
# Builds the documentation, runs/docs/index.html: a site that opens without a server or network.
# A broken link is an error. Arguments go to Sphinx: ./scripts/docs.sh -E rereads all pages.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
unset PYTHONPATH PYTHONHOME # as in setup.sh
if ! .venv/bin/python -c 'import furo, myst_parser, sphinx_copybutton' 2>/dev/null; then
  .venv/bin/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[docs]'
fi
JAX_PLATFORMS=cpu .venv/bin/python -m sphinx -q -W --keep-going -c docs/site -d runs/docs_cache \
  docs runs/docs "$@"
echo "Wrote runs/docs/index.html."
