#!/usr/bin/env bash
# Creates .venv in the repository and installs vit_jax into it, with what its scripts need (bundled
# data, export, Hugging Face's hub), at the versions of constraints.txt. Running it again installs
# only what is missing.
#
#   ./scripts/setup.sh                      from any folder; quickstart.sh calls it
#   ./scripts/setup.sh --tests              with the test tools, the PyTorch libraries that tests
#                                           compare with, and trained weights; test.sh calls it
#   ./scripts/setup.sh --newest             like --tests with the newest releases, into .venv-newest;
#                                           a further call upgrades it
#   PYTHON=python3.12 ./scripts/setup.sh    with this interpreter
#
# Without PYTHON: that of an existing environment, else the first of python3, python3.13, python3.12
# and python3.11 that is tested (3.11 to 3.13), else a newer python3, without pinned versions.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
[[ "${1:-}" != --newest ]] || venv=.venv-newest
stamp="$venv/.vit_jax_installed"            # what it was built from, once it is complete
unfinished=".setup.unfinished${venv#.venv}" # exists while it is changed: left by a killed call
extras=embedded,export,hf
# Do not find modules of another installation, nor install into the user's home.
unset PYTHONPATH PYTHONHOME
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
exec 3>&1

die() {
  echo "setup: error: $*" >&2
  exit 1
}

# choose NEWEST PROGRAM...: the first that is Python 3.11 to 3.NEWEST and can create environments
# sets `version` and `python`, its path outside of any environment.
choose() {
  local program
  for program in "${@:2}"; do
    read -r version python < <("$program" -c 'import ensurepip, sys, venv
if (3, 11) <= sys.version_info < (3, int(sys.argv[1]) + 1):
    print("%d.%d" % sys.version_info[:2], sys._base_executable)' "$1" 2>/dev/null) && return
  done
  return 1
}

# Whether the environment is up to date, which --newest never knows; more extras do no harm. Sets
# the variables of the installation.
is_installed() {
  if [[ -n "${PYTHON:-}" ]]; then
    if ! choose 99 "$PYTHON"; then
      words="$("$PYTHON" -c 'import ensurepip, sys, venv; print(sys.version)' 2>&1)" || true
      words="${words//$'\n'/ }" # its own error, such as that of a pyenv shim without that version
      die "PYTHON=$PYTHON is not Python 3.11 or newer with its venv module (${words:0:400})."
    fi
  else
    choose 99 "$venv/bin/python" || choose 13 python3 python3.13 python3.12 python3.11 ||
      choose 99 python3 || die "no Python 3.11 or newer with its venv module; install one" \
      "(Debian, Ubuntu: with python3-venv) or name it: PYTHON=/path/to/python $0"
  fi
  made_for="$version $PWD"
  wanted="$made_for $(cat setup.py pyproject.toml constraints.txt | cksum) $extras"
  installed="$(cat "$stamp" 2>/dev/null)" || installed=""
  [[ ! -e "$unfinished" && "$installed" == "$wanted"* && "$venv" == .venv ]]
}

pip_install() {
  local errors offline status=0
  [[ "$venv" == .venv ]] || set -- --upgrade "$@"
  errors="$("$venv/bin/python" -m pip install "$@" 2>&1 >&3)" || status=$?
  ((status)) || return 0
  [[ "$errors" != *"No space left"* ]] || die "the disk is full; about 3 GB are needed."
  ((status < 128)) || die "pip was killed (signal $((status - 128))); call me again."
  rm "$unfinished" # pip failed cleanly: what was installed before is still intact
  offline="name ?resolution|NewConnection|connection (broken|refused)|time(d )?out|ProxyError"
  ! grep -qiE "$offline" <<<"$errors" ||
    die "no network: pip cannot reach the package index; call me again later."
  die "pip failed: ${errors#*ERROR: }"
}

# With the package indexes of pip's configuration, which uv does not read.
uv_install() {
  local settings link
  settings="$("$venv/bin/python" -m pip config list)"
  setting() { sed -n "s/^.*\.$1='\(.*\)'\$/\1/p" <<<"$settings" | xargs; }
  for link in $(setting find-links); do
    [[ "$link" != *://* && ! -e "$link" ]] || set -- "$@" --find-links "$link"
  done
  [[ "$(setting no-index)" =~ ^(|0|[Ff]alse|no|off)$ ]] || set -- "$@" --no-index
  [[ "$venv" == .venv ]] || set -- --upgrade "$@"
  UV_DEFAULT_INDEX="$(setting index-url)" UV_INDEX="$(setting extra-index-url)" \
    UV_SYSTEM_CERTS=1 "$venv/bin/python" -m uv pip install --no-config \
    --python "$venv/bin/python" --index-strategy=unsafe-best-match "$@" 2>&3
}

case "${1:-}" in
  "") ;;
  --tests | --newest) extras+=,dev,gcs,heic,peers,real,text ;;
  -h | --help) exec sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' scripts/setup.sh ;;
  *) die "unknown argument '$1'; known: --tests, --newest, --help" ;;
esac
! is_installed || exit 0
if command -v flock >/dev/null; then
  exec 9>.setup.lock
  flock -n 9 || { echo "setup: waiting for another setup of $PWD" && flock 9; }
  ! is_installed || exit 0
fi
echo "setup: Python $version ($python) -> $PWD/$venv"
[[ ! -e "$venv" || -e "$unfinished" || "$installed" || -x "$venv/bin/python$version" ]] ||
  die "$PWD/$venv is not of Python $version and was not made by this script; move it away."
if [[ -e "$unfinished" || ("$installed" && "$installed" != "$made_for "*) ]]; then
  touch "$unfinished"
  rm -rf "$venv" # of a killed call, another Python or another folder
fi
touch "$unfinished"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  errors="$("$python" -m venv "$venv" 2>&1)" || die "cannot make $PWD/$venv (disk full?): $errors"
fi
constraints=constraints.txt
if [[ "$venv" != .venv ]]; then
  constraints=/dev/null
elif [[ "$version" != 3.1[123] ]]; then
  echo "setup: Python $version is not tested: installing the newest releases"
  constraints=/dev/null
fi
# Show progress. A sleep that outlives us must hold neither our output nor the lock.
{ while sleep 10 >/dev/null 2>&1 3>&- 9>&-; do
  echo "setup: installing packages ($SECONDS s; about a minute in all)"
done; } 9>&- &
ticker=$!
trap 'kill "$ticker" 2>/dev/null || true' EXIT
# Built with the pinned setuptools instead of the newest one.
pip_install -c "$constraints" 'setuptools>=77' 'uv>=0.9'
# uv takes a sixth of pip's time. If it fails, pip tries, and reports the error.
uv_install -c "$constraints" --no-build-isolation -e ".[$extras]" ||
  # It would compile several GB for a minute, most of which is never imported. What we import is
  # compiled on import, or else by the first script that imports it.
  pip_install -c "$constraints" --no-build-isolation --no-compile -e ".[$extras]"
compile() { env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c "$1" >/dev/null 2>&1 || true; }
compile "import vit_jax.train, vit_jax.data.pipeline, vit_jax.inference.model, matplotlib.pyplot
import sklearn.datasets, tensorboardX, tensorflow_datasets" &
compiling=$!
[[ "$extras" != *peers* ]] || compile "from tests import peers; peers.import_transformers()"
wait "$compiling"
echo "$wanted" >"$stamp"
rm "$unfinished"
if command -v nvidia-smi >/dev/null; then
  echo "setup: for JAX on this NVIDIA GPU: $venv/bin/python -m pip install -c $constraints -e '.[cuda13]'"
fi
