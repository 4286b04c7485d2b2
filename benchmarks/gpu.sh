#!/usr/bin/env bash
# Measures this project on one NVIDIA GPU, beside timm, in at most 9 minutes. What had no
# time left is measured by a second call that names it.
#
#   ./benchmarks/gpu.sh               the steps below, in this order, while time is left
#   ./benchmarks/gpu.sh h14 r50_b16   these steps only
#
#   machine    driver and packages
#   training   a run on bundled data: whole, ended by SIGTERM, resumed
#   training_deterministic   with --xla_gpu_deterministic_ops=true
#   b16        an update of B/16: images/s, share of a product's FLOP/s, memory; timm compiled in turn
#   l16, h14, r50_b16, s16   like that of b16
#   profile_l16  a trace of five updates: the ten dearest kernels, and what they compute
#   loop       the quickstart and B/16 on JPEGs: the loop beside the bare update, data wait, checkpoint
#   dropout    B/16 with the paper's dropout of 0.1, without it in turn; rbg: with that generator
#   remat      B/16 beside each remat policy, and beside a scan: images/s, memory
#   batches_b16  images/s with 1024 images down to 128, or 0 where the memory is not enough
#   products   FLOP/s of one large product: bfloat16, TF32, float32
#   attention  every attention, at 197, 257 and 577 tokens: ms, and errors beside float32
#   b16_cudnn  with cuDNN's attention beside XLA's; so s16_cudnn, l16_cudnn, h14_cudnn, r50_b16_cudnn
#   profile_b16, batches_s16   like those of l16 and b16
#   fashion_mnist  configs/fashion_mnist.py:gpu, whole, on the files in the folder FASHION_MNIST, and
#   fashion_mnist_tuned  its fine-tuning of the weights WEIGHTS at 112 pixels: both only if named
#
# timm's models are compiled first, side by side and beside `machine` and `training`: timm_*.json
# say for how long. Later steps find them in torch's cache.
#
# Each step writes $OUT/gpu/STEP.json (OUT: benchmarks/results) and STEP.log, which also has what was
# measured before a time-out. steps.txt says how each ended (0: measured; 124: out of time).
#
#   PYTHON=python3.12   the interpreter. What it cannot import is installed into VENV
#                       (/tmp/vit_jax_gpu); without a network set PIP_FIND_LINKS=FOLDER, PIP_NO_INDEX=1
#                       and PIP_NO_BUILD_ISOLATION=1
#   BUDGET=540          seconds in all
#   SMALL=1             tiny sizes, on a CPU too: tries the script, measures nothing
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ "${1:-}" != -* ]] || exec sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' benchmarks/gpu.sh
budget="${BUDGET:-540}" python="${PYTHON:-python3}" small="${SMALL:-}"
fashion_mnist="${FASHION_MNIST:-/usr/share/datasets/fashion-mnist}" weights="${WEIGHTS:-dinov2s}"
training_steps=300 cudnn=cudnn tiny=()
[[ -z "$small" ]] || training_steps=60 cudnn=chunked # for CPUs
[[ -z "$small" ]] || tiny=(--config.model.{num_layers=1,hidden_size=32,num_heads=2,mlp_dim=32})
all=(machine training training_deterministic b16 l16 h14 r50_b16 s16 profile_l16 loop dropout rbg remat
  batches_b16 products attention b16_cudnn profile_b16 batches_s16)
for step in "$@"; do
  [[ " ${all[*]} s16_cudnn l16_cudnn h14_cudnn r50_b16_cudnn fashion_mnist fashion_mnist_tuned " == \
    *" $step "* ]] ||
    { echo "gpu.sh: unknown step '$step'; see --help" >&2 && exit 2; }
done
((!$#)) || all=("$@")
dropped=(--config.model.dropout_rate=0.1 --against=dropout_rate=0.0)
declare -A variants=([s16]=S/16 [b16]=B/16 [l16]=L/16 [h14]=H/14 [r50_b16]=R50+B/16)
declare -A batch_sizes=([s16]=256 [b16]=256 [l16]=128 [h14]=32 [r50_b16]=128)
out="$(realpath -m -- "${OUT:-benchmarks/results}")/gpu"
mkdir -p "$out"
: >"$out/steps.txt"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PIP_DISABLE_PIP_VERSION_CHECK=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false # timm takes its memory beside JAX
export TORCHINDUCTOR_CACHE_DIR="${TMPDIR:-/tmp}/vit_jax_timm" TORCHINDUCTOR_AUTOGRAD_CACHE=1

# within SECONDS NAME COMMAND...: runs it for so long, or for what is left of the budget
within() {
  local limit="$1" name="$2" start=$SECONDS status=0
  ((limit <= budget - SECONDS)) || limit=$((budget - SECONDS))
  if ((limit < 5)); then
    status=124
  else
    timeout -k 5 "$limit" "${@:3}" >"$out/$name.log" 2>&1 || status=$?
  fi
  echo "$name $status $((SECONDS - start)) s" | tee -a "$out/steps.txt"
  return "$status"
}

can_run() {
  "$python" -c '
import importlib.util, sys, jax, sklearn, torch, vit_jax.train
assert importlib.util.find_spec("timm")
sys.exit(jax.devices()[0].platform != "gpu" and not sys.argv[1])' "$small" >/dev/null 2>&1
}

install() {
  local cuda=cuda12
  ! nvidia-smi 2>/dev/null | grep -q "CUDA Version: 1[3-9]" || cuda=cuda13
  "$python" -m venv --system-site-packages "$venv"
  "$venv/bin/python" -m pip install -e ".[embedded,$cuda]" timm
}

if ! can_run; then
  venv="${VENV:-/tmp/vit_jax_gpu}"
  export -f install
  export python venv
  within 240 install bash -euc install || true
  python="$venv/bin/python"
  can_run || { echo "gpu.sh: JAX sees no GPU, or a package is missing; see $out/install.log" >&2 && exit 2; }
fi

machine() {
  nvidia-smi -q || true
  "$python" -m pip list
}
export -f machine
export python

update() { # SECONDS NAME MODEL ARGUMENT...
  local settings=(--steps=10 --rounds=5)
  [[ -z "$small" ]] || settings=(--steps=1 --rounds=1 "${tiny[@]}")
  within "$1" "$2" "$python" benchmarks/step.py --variant="${variants[$3]}" \
    --json="$out/$2.json" --config.dataset.batch_size="${small:-${batch_sizes[$3]}}" \
    --config.model.dtype=bfloat16 "${@:4}" "${settings[@]}"
}

part() { # SECONDS NAME ARGUMENT...
  within "$1" "$2" "$python" benchmarks/gpu.py "${2%%_*}" --json="$out/$2.json" "${@:3}"
}

recipe() { # SECONDS NAME SCRIPT RECIPE FLAG...: a run of configs/fashion_mnist.py, to its results
  local short=()
  [[ -z "$small" ]] || short=(--config.model.dtype=float32 --config.duration.steps=2
    --config.schedule.warmup_steps=1 --config.dataset.batch_size=16 --config.loader.num_workers=0
    --config.evaluators.test.split='test[:16]')
  within "$1" "$2" "$python" "scripts/$3.py" --config="configs/fashion_mnist.py:$4" \
    --config.dataset.name="$fashion_mnist" --workdir="$out/$2" "${@:5}" "${short[@]}" &&
    cp "$out/$2/results.json" "$out/$2.json"
}

sizes_of() { # MODEL: sets `sizes`
  sizes=(--variant="${variants[$1]:-B/16}" --batch_size="${small:-${batch_sizes[$1]:-256}}" "${tiny[@]}")
}

# Each takes minutes of one core: three at a time, whose memory is there at once.
compile_timm() {
  local chain model
  for chain in "r50_b16" "l16 s16" "h14 b16"; do
    for model in $chain; do
      [[ " ${all[*]} " == *" $model "* ]] || continue
      sizes_of "$model"
      part 240 "timm_$model" "${sizes[@]}" || true
    done &
  done
  wait
  # Chosen by the clock, while others ran: each is chosen again.
  find "$TORCHINDUCTOR_CACHE_DIR" -name '*.best_config' -delete 2>/dev/null || true
}

compile_timm &
compiling=$!
for step in "${all[@]}"; do
  model="${step#*_}"
  sizes_of "$model"
  [[ "$step" == @(machine|training*) ]] || wait "$compiling" # what follows is timed
  case "$step" in
    machine) within 20 "$step" bash -c machine ;;
    products) part 30 "$step" ;;
    attention) part 200 "$step" --batch_size="${small:-64}" ;;
    profile_*) # a CUDA graph hides what its kernels compute
      XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=" part 90 "$step" "${sizes[@]}"
      ;;
    batches_*) part 150 "$step" "${sizes[@]}" ;;
    loop) part 120 "$step" "${sizes[@]}" --steps=$((small ? 60 : 1500)) ;;
    training) part 160 "$step" --steps="$training_steps" ;;
    training_deterministic)
      XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_deterministic_ops=true" \
        part 160 "$step" --steps="$training_steps"
      ;;
    fashion_mnist) recipe 400 "$step" train gpu ;;
    fashion_mnist_tuned)
      recipe 400 "$step" finetune "finetune,$weights,112" --config.model.dtype=bfloat16 \
        --config.loader.num_workers=12
      ;;
    *_cudnn) update 120 "$step" "${step%_*}" --config.model.attention="$cudnn" --against=xla ;;
    dropout) update 100 "$step" b16 "${dropped[@]}" ;;
    rbg) JAX_DEFAULT_PRNG_IMPL=rbg update 100 "$step" b16 "${dropped[@]}" ;;
    remat)
      update 240 "$step" b16 --against=remat=dots,remat=dots_with_no_batch_dims,remat=full,scan=True
      ;;
    *) update 240 "$step" "$step" --against=timm ;;
  esac || true
done
sed -n 's/ 124 .*//p' "$out/steps.txt" | xargs -r echo "No time was left: ./benchmarks/gpu.sh"
