# shellcheck shell=bash
# Sourced by the launchers: messages, quoting, dry runs, and the training command they all start.
# Runs on users' machines, also those with bash 3.2 (macOS).

dry_run=""

say() { echo "${program:?}: $*" >&2; }

# A mistake of the user: one line, status 2.
die() {
  echo "$program: error: $*" >&2
  exit 2
}

# Something out there failed: one line, status 1.
fail() {
  echo "$program: error: $*" >&2
  exit 1
}

# The comment at the top of the script.
show_help() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$1"; }

# One argument as one word of a POSIX shell, whatever it contains.
quote() {
  local rest="$1" quoted="" apostrophe="'"
  case "$rest" in
    "" | *[!A-Za-z0-9_@%+=:,./-]*) ;;
    *)
      printf '%s' "$rest"
      return
      ;;
  esac
  while [[ "$rest" == *"$apostrophe"* ]]; do
    quoted+="${rest%%"$apostrophe"*}'\\''"
    rest="${rest#*"$apostrophe"}"
  done
  printf "'%s'" "$quoted$rest"
}

# All arguments as one command line.
quote_all() {
  local word separator=""
  for word in "$@"; do
    printf '%s' "$separator"
    quote "$word"
    separator=" "
  done
}

# Runs a command, or prints it in a dry run.
run() {
  if [[ -n "$dry_run" ]]; then
    quote_all "$@"
    echo
  else
    "$@"
  fi
}

# confirm QUESTION: true if the answer on the terminal is yes.
confirm() {
  local answer=""
  printf '%s [y/N] ' "$1" >&2
  read -r answer || true
  [[ "$answer" == [yY] || "$answer" == [yY][eE][sS] ]]
}

# check_number FLAG VALUE: a whole number from 1.
check_number() { [[ "$2" =~ ^[1-9][0-9]*$ ]] || die "$1=$2 must be a whole number from 1."; }

# check_name NAME: what Google Cloud, Kubernetes and file names all accept.
check_name() {
  [[ -n "$1" ]] || die "--name is missing; see --help."
  [[ "$1" =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
    die "--name=$1 must be small letters, digits and dashes, from a letter on, at most 40."
}

# check_has_value FLAG: not `--bucket=`, as of a variable that is not set.
check_has_value() {
  [[ ! "$1" =~ ^--[a-z_]+=$ ]] || die "$1 has no value; give one, or leave the flag out."
}

# check_bucket NAME: what Cloud Storage accepts, without a folder in it.
check_bucket() {
  [[ "$1" =~ ^[a-z0-9][-_.a-z0-9]*$ ]] ||
    die "--bucket=$1 must be the name of a bucket, without folders in it."
}

# check_recipe FOLDER: whether the recipe that `training` names is there, relative to FOLDER.
check_recipe() {
  local word recipe="" previous=""
  for word in "${training[@]}"; do
    case "$previous" in -config | --config) recipe="$word" ;; esac
    case "$word" in -config=* | --config=*) recipe="${word#*=}" ;; esac
    previous="$word"
  done
  [[ -n "$recipe" || "${training[0]}" != *train.py ]] ||
    die "--config is missing among the training flags (after --)."
  recipe="${recipe%%:*}"
  [[ -z "$recipe" || "$recipe" == /* || -f "$1/$recipe" ]] ||
    die "--config=$recipe: there is no such recipe in $1."
}

# training_command SCRIPT FLAG...: sets `training` to the script and its flags, and `workdir`.
training_command() {
  local flag previous="" distributed="--distributed=auto"
  training=("$1")
  shift
  workdir=""
  (($#)) || die "the training flags are missing; give them after --, as in: -- --config=... --workdir=..."
  for flag in "$@"; do
    case "$previous" in -workdir | --workdir) workdir="$flag" ;; esac
    case "$flag" in
      -workdir=* | --workdir=*) workdir="${flag#*=}" ;;
      -distributed=off | --distributed=off) die "$flag would train a run of its own in each process." ;;
      -distributed* | --distributed*) distributed="" ;;
    esac
    previous="$flag"
  done
  [[ -n "$workdir" ]] || die "--workdir is missing among the training flags (after --)."
  case "$workdir" in
    gs://*) ;;
    *://*) die "--workdir=$workdir must be gs://BUCKET/FOLDER, or a path of a file system that all hosts share; see docs/launch.md." ;;
  esac
  # Says that this is one of several processes, wherever JAX can tell which.
  [[ -z "$distributed" ]] || training+=("$distributed")
  training+=("$@")
}
