#!/usr/bin/env bash
# Trains on Google Kubernetes Engine: fills in gke/jobset.yaml for a TPU slice, several, or machines
# with GPUs, and hands it to kubectl.
#
#   scripts/gke.sh COMMAND --name=NAME [FLAGS] [-- TRAINING FLAGS]
#
#   render   prints the manifest
#   apply    starts the run
#     --image=...                  built from the Dockerfile, in a registry the cluster reads
#     --accelerator=v5e-256        v3, v4, v5p: cores; v5e, v6e: chips
#     --slices=1                   several: multislice, the mesh's data axis over the slices
#     --gpus_per_node=8 --nodes=2 --gpu_type=nvidia-h100-80gb    in place of --accelerator
#     --spot
#     --bucket=NAME                Cloud Storage through the gcsfuse driver, or
#     --volume_claim=NAME          a ReadWriteMany claim (Filestore)
#     --folder=/mnt/work           where that appears; --workdir must be in it
#     --service_account=default    of Kubernetes; for a bucket one that may write to it
#     --script=scripts/train.py
#     --env=KEY=VALUE              visible to whoever reads the manifest; may be repeated
#     --max_restarts=100
#   logs     follows process 0; --worker=all follows all
#   status   of the run and its pods
#   stop     SIGTERM: the run saves and ends; its pods are removed
#   resume   continues after stop
#   delete   removes it; asks, unless --yes
#
# For all commands: --namespace=default, --context=... (of kubectl), --dry_run (prints every command,
# and the manifest, and runs none). What it needs and a walk through it: docs/launch.md.
set -euo pipefail

program=gke
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source-path=SCRIPTDIR source=launchers/shell.sh
source "$root/scripts/launchers/shell.sh"
# shellcheck source-path=SCRIPTDIR source=launchers/tpu_types.sh
source "$root/scripts/launchers/tpu_types.sh"

known="render, apply, logs, status, stop, resume, delete"
name="" namespace=default image="" accelerator="" slices=1 gpus_per_node="" nodes="" gpu_type=""
spot="" bucket="" volume_claim="" folder=/mnt/work service_account=default script=scripts/train.py
max_restarts=100 worker=0 yes=""
environment=() rest=()
kubectl=(kubectl)

parse_flags() {
  while (($#)); do
    check_has_value "$1"
    case "$1" in
      --name=*) name="${1#*=}" ;;
      --namespace=*) namespace="${1#*=}" ;;
      --context=*) kubectl+=("$1") ;;
      --image=*) image="${1#*=}" ;;
      --accelerator=*) accelerator="${1#*=}" ;;
      --slices=*) slices="${1#*=}" ;;
      --gpus_per_node=*) gpus_per_node="${1#*=}" ;;
      --nodes=*) nodes="${1#*=}" ;;
      --gpu_type=*) gpu_type="${1#*=}" ;;
      --spot) spot=1 ;;
      --bucket=*) bucket="${1#*=}" && bucket="${bucket#gs://}" ;;
      --volume_claim=*) volume_claim="${1#*=}" ;;
      --folder=*) folder="${1#*=}" && folder="${folder%/}" ;;
      --service_account=*) service_account="${1#*=}" ;;
      --script=*) script="${1#*=}" ;;
      --env=*) environment+=("${1#*=}") ;;
      --max_restarts=*) max_restarts="${1#*=}" ;;
      --worker=*) worker="${1#*=}" ;;
      --yes) yes=1 ;;
      --dry_run) dry_run=1 program="gke (dry run)" ;;
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

# Of a manifest: also sets what the machines are (hosts, chips_per_host, ...) and `training`.
check_manifest_flags() {
  local pair word
  for pair in "--image=$image" "--bucket=$bucket" "--volume_claim=$volume_claim" "--folder=$folder" \
    "--namespace=$namespace" "--service_account=$service_account" "--gpu_type=$gpu_type"; do
    [[ "${pair#*=}" =~ ^[A-Za-z0-9._/:@-]*$ ]] || die "$pair must be letters, digits and ._/:@-."
  done
  [[ -z "$bucket" ]] || check_bucket "$bucket"
  [[ "$folder" == /*[!/]* ]] || die "--folder=$folder must be a path from / on."
  [[ "$folder" != /vit_jax* ]] || die "--folder=$folder would hide the code, which is in /vit_jax."
  [[ "$namespace" =~ ^[a-z0-9]([-a-z0-9]*[a-z0-9])?$ ]] ||
    die "--namespace=$namespace must be small letters, digits and dashes."
  [[ -f "$root/$script" ]] || die "--script=$script does not exist in $root."
  [[ -n "$image" ]] || die "--image is missing; build one from the Dockerfile (docs/launch.md)."
  check_number --slices "$slices"
  check_number --max_restarts "$max_restarts"
  if [[ -n "$gpus_per_node$nodes$gpu_type" ]]; then
    [[ -z "$accelerator" ]] || die "--accelerator and --gpus_per_node exclude each other."
    check_number --gpus_per_node "$gpus_per_node"
    check_number --nodes "$nodes"
    [[ -n "$gpu_type" ]] || die "--gpu_type is missing, as in --gpu_type=nvidia-h100-80gb."
    [[ "$slices" == 1 ]] || die "--slices=$slices is for TPUs; take --nodes."
  else
    [[ -n "$accelerator" ]] || die "--accelerator is missing, as in --accelerator=v5e-16 (or --gpus_per_node)."
    tpu_type "$accelerator"
    [[ -n "$gke_type" ]] || die "--accelerator=$accelerator: GKE has no TPU $generation; take scripts/tpu_pod.sh."
    ((slices == 1 || hosts > 1)) ||
      die "--slices=$slices: GKE joins slices of several machines only; $accelerator is one machine."
  fi
  [[ -z "$bucket" || -z "$volume_claim" ]] || die "--bucket and --volume_claim exclude each other."
  for pair in ${environment[@]+"${environment[@]}"}; do
    [[ "$pair" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || die "--env=$pair must be KEY=VALUE."
  done
  training_command "$script" ${rest[@]+"${rest[@]}"}
  [[ -n "$bucket$volume_claim" || "$workdir" == gs://* ]] ||
    die "--workdir=gs://BUCKET/FOLDER, --bucket or --volume_claim is missing: pods keep nothing."
  case "$workdir" in
    "$folder"/* | gs://*) ;;
    *) die "--workdir=$workdir must be in --folder=$folder; pods keep nothing else." ;;
  esac
  for word in "${training[@]}" ${environment[@]+"${environment[@]}"}; do
    [[ "$word" != *[[:cntrl:]]* ]] ||
      die "a line break or control character cannot be passed on: $(printf '%q' "$word")"
  done
}

# A string of JSON, which is one of YAML. Kubernetes replaces $(NAME) in arguments; $$ stands for $.
json_string() {
  printf '"%s"' "$(printf '%s' "$1" | sed -e 's/\\/\\\\/g' -e 's/"/\\"/g' -e 's/\$/$$/g')"
}

arguments() {
  local word separator=""
  for word in "$@"; do
    printf '%s' "$separator"
    json_string "$word"
    separator=", "
  done
}

# Pods of GPUs do not find each other by themselves without rights in the cluster.
gpu_arguments() {
  ((nodes > 1)) || return 0
  printf '"--coordinator_address=%s-workers-0-0.%s:8476", "--num_processes=%s", ' \
    "$name" "$name" "$nodes"
  # shellcheck disable=SC2016  # Kubernetes fills it in
  printf '"--process_id=$(JOB_COMPLETION_INDEX)", '
}

environment_list() {
  local pair separator=""
  for pair in ${environment[@]+"${environment[@]}"}; do
    printf '%s{name: %s, value: ' "$separator" "${pair%%=*}"
    json_string "${pair#*=}"
    printf '}'
    separator=", "
  done
}

# fill KEY VALUE: in `manifest`. Not by the shell's own replacement, in which some versions give
# characters of the value a meaning.
fill() {
  local filled=""
  while [[ "$manifest" == *"@$1@"* ]]; do
    filled+="${manifest%%"@$1@"*}$2"
    manifest="${manifest#*"@$1@"}"
  done
  manifest="$filled$manifest"
}

render() {
  local selector volume words script_word
  manifest="$(cat "$root/scripts/gke/jobset.yaml")"
  words="$(arguments "${training[@]:1}")"
  script_word="$(json_string "${training[0]}")"
  if [[ -n "$accelerator" ]]; then
    selector="cloud.google.com/gke-tpu-accelerator: $gke_type, cloud.google.com/gke-tpu-topology: $topology"
    # One slice is one node pool: its pods must not spread over two.
    fill JOBSET_ANNOTATIONS "alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool"
    fill CONTAINER_SECURITY "privileged: true, runAsUser: 0" # the TPU's devices are root's
    fill RESOURCE google.com/tpu
    fill HOSTS "$hosts"
    fill PER_HOST "$chips_per_host"
  else
    selector="cloud.google.com/gke-accelerator: $gpu_type"
    words="$(gpu_arguments)$words"
    fill JOBSET_ANNOTATIONS ""
    fill CONTAINER_SECURITY ""
    fill RESOURCE nvidia.com/gpu
    fill HOSTS "$nodes"
    fill PER_HOST "$gpus_per_node"
  fi
  [[ -z "$spot" ]] || selector+=", cloud.google.com/gke-spot: \"true\""
  if [[ -n "$bucket" ]]; then
    # As in launchers/tpu_worker.sh: nothing that another process wrote may be missed.
    volume="{name: work, csi: {driver: gcsfuse.csi.storage.gke.io, volumeAttributes: {bucketName: $bucket, mountOptions: \"implicit-dirs,metadata-cache:ttl-secs:0,rename-dir-limit=1000000\"}}}"
  elif [[ -n "$volume_claim" ]]; then
    volume="{name: work, persistentVolumeClaim: {claimName: $volume_claim}}"
  else
    volume="{name: work, emptyDir: {}}" # --workdir is in a bucket
  fi
  fill USES_BUCKET "$([[ -n "$bucket" ]] && echo true || echo false)"
  fill NAMESPACE "$namespace"
  fill NAME "$name"
  fill MAX_RESTARTS "$max_restarts"
  fill SLICES "$slices"
  fill SERVICE_ACCOUNT "$service_account"
  fill NODE_SELECTOR "$selector"
  fill IMAGE "$image"
  fill FOLDER "$folder"
  fill VOLUME "$volume"
  # Last: the user's words may contain anything.
  fill ENVIRONMENT "$(environment_list)"
  fill ARGUMENTS "$script_word, $words"
  printf '%s\n' "$manifest"
}

apply() {
  local filled
  filled="$(render)"
  if [[ -n "$dry_run" ]]; then
    echo "$(quote_all "${kubectl[@]}" apply --filename=-) <<'EOF_MANIFEST'"
    printf '%s\nEOF_MANIFEST\n' "$filled"
  else
    printf '%s\n' "$filled" | "${kubectl[@]}" apply --filename=-
  fi
}

logs() {
  local label="jobset.sigs.k8s.io/jobset-name=$name"
  if [[ "$worker" == all ]]; then
    run "${kubectl[@]}" logs --namespace="$namespace" --selector="$label" --container=train --follow \
      --prefix --max-log-requests=10000
  else
    label+=",jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=$worker"
    run "${kubectl[@]}" logs --namespace="$namespace" --selector="$label" --container=train --follow \
      --tail=100
  fi
}

suspend() {
  run "${kubectl[@]}" patch jobset "$name" --namespace="$namespace" --type=merge \
    --patch="{\"spec\":{\"suspend\":$1}}"
}

delete() {
  if [[ -z "$yes$dry_run" ]]; then
    confirm "Delete JobSet $name in namespace $namespace and stop what it runs?" ||
      fail "$name was not deleted."
  fi
  run "${kubectl[@]}" delete jobset "$name" --namespace="$namespace"
}

main() {
  local command="${1:-}"
  case "$command" in
    -h | --help)
      show_help "${BASH_SOURCE[0]}"
      return
      ;;
    render | apply | logs | status | stop | resume | delete) shift ;;
    *) die "unknown command '$command'; known: $known; see --help." ;;
  esac
  parse_flags "$@"
  check_name "$name"
  [[ "$worker" == all || "$worker" =~ ^[0-9]+$ ]] || die "--worker=$worker must be a number or all."
  case "$command" in
    render | apply)
      check_manifest_flags
      "$command"
      ;;
    status)
      run "${kubectl[@]}" get jobset "$name" --namespace="$namespace"
      run "${kubectl[@]}" get pods --namespace="$namespace" --output=wide \
        --selector="jobset.sigs.k8s.io/jobset-name=$name"
      ;;
    stop) suspend true ;;
    resume) suspend false ;;
    *) "$command" ;;
  esac
}

main "$@"
