#!/usr/bin/env bash
# Makes .venv in the repository and installs vit_jax into it, with what its scripts need (bundled
# data, export, Hugging Face's hub), at the versions of constraints/pyX.Y.txt. Calling it again does
# only what is missing.
#
#   ./scripts/setup.sh                       from any folder; quickstart.sh calls it
#   ./scripts/setup.sh --tests               with the test tools and the PyTorch peers that tests
#                                            compare with; test.sh calls it
#   PYTHON=python3.12 ./scripts/setup.sh     with this interpreter
#   ./scripts/setup.sh --update-constraints  rewrite the constraints file of this interpreter's
#                                            version from the newest releases (then run test.sh)
#
# Without PYTHON: the interpreter of an existing .venv; else python3, if it is 3.11 or newer and
# has a constraints file; else python3.13, python3.12, python3.11; else any newer python3, for
# which nothing is pinned.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
stamp="$venv/.vit_jax_installed"
unfinished="$root/.setup.unfinished" # there while .venv is being changed: left by a killed call
extras="embedded,export,hf"
test_extras="embedded,dev,export,hf,peers"
# The last that has a wheel without CUDA libraries (several GB, which no test needs) for Python 3.11.
torch="torch==2.13.0"
no_network="name resolution|resolve host|Network is unreachable|NewConnection|ConnectTimeout|ProxyError"
no_network+="|Connection refused|Read timed out|Connection broken"
# Another installation's modules must not be found instead of ours, nor ours go to the user's home.
unset PYTHONPATH PYTHONHOME
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "setup: $*"; }
die() {
  echo "setup: error: $*" >&2
  exit 1
}

# X.Y of an interpreter that is 3.11 or newer; fails for anything else.
version_of() {
  "$1" -c 'import sys; v = sys.version_info; print("%d.%d" % v[:2]); sys.exit(v < (3, 11))' \
    2>/dev/null
}

constraints_for() { echo "$root/constraints/py$1.txt"; }

# Sets `python` and `version`.
choose_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON is not a program."
    version="$(version_of "$PYTHON")" ||
      die "PYTHON=$PYTHON is Python ${version:-of an unknown version}; 3.11 or newer is needed."
    python="$PYTHON"
    return
  fi
  for candidate in "$venv/bin/python" python3 python3.13 python3.12 python3.11; do
    version="$(version_of "$candidate")" || continue
    if [[ -f "$(constraints_for "$version")" ]]; then
      python="$candidate"
      return
    fi
  done
  for candidate in "$venv/bin/python" python3; do
    version="$(version_of "$candidate")" || continue
    python="$candidate"
    return
  done
  die "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python $0"
}

# What a finished installation was made of. Another folder counts: the package is installed as a
# link to it.
fingerprint() {
  local constraints
  constraints="$(constraints_for "$version")"
  [[ -f "$constraints" ]] || constraints=/dev/null
  echo "$version $root $(cat "$root/setup.py" "$root/pyproject.toml" "$constraints" | cksum)"
}

# With the extras asked for, or with all of them.
is_installed() {
  local found
  [[ -f "$stamp" ]] || return 1
  found="$(cat "$stamp")"
  [[ "$found" == "$(fingerprint) $extras" || "$found" == "$(fingerprint) $test_extras" ]] &&
    version_of "$venv/bin/python" >/dev/null
}

check_venv_module() {
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "Python $version has no venv module; on Debian or Ubuntu: apt install python$version-venv"
}

# make_venv FOLDER [--clear]: new, or repaired (a moved repository, pip missing), or emptied first.
make_venv() {
  if [[ "$python" == "$1/bin/python" ]]; then
    # Not by itself: a venv that rewrites or empties itself loses its interpreter on the way.
    python="$("$python" -c 'import sys; print(sys._base_executable)')"
  fi
  "$python" -m venv "${@:2}" "$1" ||
    die "could not make $1 (is the folder writable and the disk not full?)"
}

# Makes or repairs .venv; one that a killed call left, or of another Python, starts empty.
make_own_venv() {
  local clear=() found=""
  if [[ -e "$unfinished" ]]; then
    clear=(--clear)
  elif [[ -d "$venv" ]]; then
    found="$(version_of "$venv/bin/python")" || found=unknown
    if [[ "$found" != "$version" ]]; then
      [[ -f "$stamp" ]] ||
        die "$venv is of Python $found and was not made by this script; move it away."
      clear=(--clear)
    fi
  fi
  touch "$unfinished" || die "$root is not writable."
  make_venv "$venv" ${clear[@]+"${clear[@]}"}
}

# pip_install FOLDER ARGUMENT...: pip's own output, and one line that names the cause if it fails.
pip_install() {
  local log="$1/setup.log" target="$1/bin/python" status=0
  shift
  "$target" -m pip install "$@" 2>&1 | tee "$log" || status="${PIPESTATUS[0]}"
  if ((status == 0)); then
    return
  elif grep -q 'No space left on device' "$log"; then
    die "the disk is full; about 2 GB are needed (details: $log)."
  elif ((status >= 128)); then
    die "pip was killed (signal $((status - 128))); call me again."
  fi
  rm -f "$unfinished" # pip gave up in good order: what was installed before is still whole
  if grep -qiE "$no_network" "$log"; then
    die "no network: pip could not reach the package index (details: $log); call me again later."
  fi
  die "pip failed: $(grep -m1 'ERROR' "$log" || tail -n 1 "$log") (details: $log)"
}

# install_into FOLDER PIP_OPTION...
install_into() {
  local folder="$1"
  shift
  # Built with the pinned setuptools instead of whatever is newest on the day.
  pip_install "$folder" "$@" 'setuptools>=77'
  pip_install "$folder" "$@" --no-build-isolation -e "${root}[$extras]"
}

update_constraints() {
  local scratch constraints
  check_venv_module
  constraints="$(constraints_for "$version")"
  scratch="$(mktemp -d)"
  # shellcheck disable=SC2064  # the folder of now
  trap "rm -rf '$scratch'" EXIT
  make_venv "$scratch/venv"
  echo "$torch" >"$scratch/torch.txt"
  extras="$test_extras"
  install_into "$scratch/venv" -c "$scratch/torch.txt"
  mkdir -p "$root/constraints"
  {
    echo "# Exact versions of everything that scripts/setup.sh installs on Python $version, tested."
    echo "# Made by: PYTHON=python$version ./scripts/setup.sh --update-constraints"
    # Links to files or hosts (our own package) do not belong here, and pip serves itself.
    "$scratch/venv/bin/python" -m pip freeze --all | grep -E '^[A-Za-z0-9._-]+==' | grep -v '^pip==' |
      sed 's/+cpu$//'
  } >"$scratch/constraints.txt"
  mv "$scratch/constraints.txt" "$constraints"
  say "wrote $constraints"
}

main() {
  case "${1:-}" in
    "" | --update-constraints) ;;
    --tests) extras="$test_extras" ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
      return
      ;;
    *) die "unknown argument '$1'; known: --tests, --update-constraints, --help" ;;
  esac
  choose_python
  if [[ "${1:-}" == --update-constraints ]]; then
    update_constraints
    return
  fi
  if is_installed; then
    return
  fi
  if command -v flock >/dev/null; then
    { exec 9>"$root/.setup.lock"; } 2>/dev/null || die "$root is not writable."
    flock -n 9 || { say "waiting for another setup of $root"; flock 9; }
    choose_python # the other one may have made .venv meanwhile
    if is_installed; then
      return
    fi
  fi
  say "Python $version ($(command -v "$python")) -> $venv"
  local constraints options=()
  constraints="$(constraints_for "$version")"
  if [[ -f "$constraints" ]]; then
    options=(-c "$constraints")
  else
    say "no tested versions for Python $version in constraints/: installing the newest releases"
  fi
  check_venv_module
  make_own_venv
  rm -f "$stamp"
  install_into "$venv" ${options[@]+"${options[@]}"}
  echo "$(fingerprint) $extras" >"$stamp.new"
  mv "$stamp.new" "$stamp"
  rm -f "$unfinished"
  if command -v nvidia-smi >/dev/null; then
    say "for JAX on this machine's NVIDIA GPU: $venv/bin/python -m pip install ${options[*]} -e '${root}[cuda13]'"
  fi
  say "done"
}

main "$@"
