#!/usr/bin/env bash
# pack.sh [--dirty] FILE: packs this checkout for another machine as FILE (.tar.gz), with enough of
# .git for a run to note its commit. --dirty takes the files as they are now (without ignored
# ones) in place of the committed ones.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
dirty=""
if [[ "$1" == --dirty ]]; then
  dirty=1
  shift
fi
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# macOS's tar would add files of its own.
export COPYFILE_DISABLE=1

git clone --quiet --depth=1 --no-tags "file://$root" "$scratch/vit_jax"
if [[ -n "$dirty" ]]; then
  (cd "$scratch/vit_jax" && git ls-files -z | xargs -0 rm -f)
  (cd "$root" && git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    # Deleted files are still in git's list.
    if [[ -e "$file" || -L "$file" ]]; then printf '%s\0' "$file"; fi
  done >"$scratch/files")
  tar -c -f - -C "$root" --null -T "$scratch/files" | tar -x -f - -C "$scratch/vit_jax"
fi
mkdir -p "$(dirname "$1")"
tar -c -z -f "$1" -C "$scratch/vit_jax" .
