# shellcheck shell=bash
# Sourced by the launchers: what a TPU slice is made of. The numbers are Google's: "TPU v2 ... v6e"
# of the Cloud TPU documentation, "Plan TPUs in GKE".
# shellcheck disable=SC2034  # the variables are for the scripts that source this

# A size is TensorCores up to v4 and for v5p, chips for v5e and v6e; then the chips' arrangement.
tpu_sizes() {
  case "$1" in
    v2) echo 8:2x2 32:4x4 128:8x8 256:8x16 512:16x16 ;;
    v3) echo 8:2x2 32:4x4 64:4x8 128:8x8 256:8x16 512:16x16 1024:16x32 2048:32x32 ;;
    v4) echo 8:2x2x1 16:2x2x2 32:2x2x4 64:2x4x4 128:4x4x4 256:4x4x8 512:4x8x8 1024:8x8x8 \
      2048:8x8x16 4096:8x16x16 ;;
    v5p) echo 8:2x2x1 16:2x2x2 32:2x2x4 64:2x4x4 128:4x4x4 256:4x4x8 512:4x8x8 1024:8x8x8 \
      2048:8x8x16 4096:8x16x16 8192:16x16x16 12288:16x16x24 ;;
    v5e | v6e) echo 1:1x1 4:2x2 8:2x4 16:4x4 32:4x8 64:8x8 128:8x16 256:16x16 ;;
    *) die "--accelerator=$accelerator: unknown generation; known: v2, v3, v4, v5e, v5p, v6e, as in v5e-256." ;;
  esac
}

# tpu_type v5e-256: sets generation, topology, chips, chips_per_host, hosts, and the names that
# Cloud TPU (cloud_type, runtime_version) and GKE (gke_type, empty where GKE has none) use.
tpu_type() {
  local accelerator="$1" size="${1##*-}" sizes row dimension known=""
  generation="${accelerator%-*}"
  case "$generation" in v5litepod) generation=v5e ;; esac
  sizes="$(tpu_sizes "$generation")" || exit
  topology=""
  for row in $sizes; do
    known+="${known:+, }$generation-${row%%:*}"
    [[ "${row%%:*}" != "$size" ]] || topology="${row#*:}"
  done
  [[ -n "$topology" ]] || die "--accelerator=$accelerator is no size of a slice; known: $known."
  chips=1
  for dimension in ${topology//x/ }; do chips=$((chips * dimension)); done
  chips_per_host=4
  case "$generation-$chips" in
    v5e-1 | v6e-1) chips_per_host=1 ;;
    v5e-8 | v6e-8) chips_per_host=8 ;; # one machine; larger slices have machines of 4
  esac
  hosts=$((chips / chips_per_host))
  cloud_type="$generation-$size"
  case "$generation" in
    v2) runtime_version=tpu-ubuntu2204-base gke_type="" ;;
    v3)
      runtime_version=tpu-ubuntu2204-base gke_type=tpu-v3-slice
      ((hosts > 1)) || gke_type=tpu-v3-device
      ;;
    v4) runtime_version=tpu-ubuntu2204-base gke_type=tpu-v4-podslice ;;
    v5e)
      cloud_type="v5litepod-$size"
      runtime_version=v2-alpha-tpuv5-lite gke_type=tpu-v5-lite-podslice
      ;;
    v5p) runtime_version=v2-alpha-tpuv5 gke_type=tpu-v5p-slice ;;
    v6e) runtime_version=v2-alpha-tpuv6e gke_type=tpu-v6e-slice ;;
  esac
}
