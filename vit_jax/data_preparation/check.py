"""`check_prepared`: verifies that a prepared dataset is unchanged."""

from __future__ import annotations

import os
from pathlib import Path

from tqdm import tqdm

from vit_jax.data.sources import map_threads
from vit_jax.errors import UserError, one_line
from vit_jax.files.manifest import MANIFEST, digest, read_manifest


def check_prepared(directory: str) -> list[tuple[str, str]]:
    """Damaged files of a prepared `.../NAME/VERSION`, and why; UserError: no intact checksums."""
    folder = Path(os.path.expanduser(directory)).absolute()
    if (manifest := read_manifest(folder)) is None:
        what = f"has no intact {MANIFEST}"
        raise UserError(f"{folder}: {what}; give a .../NAME/VERSION prepared by vit_jax.")
    files = manifest["files"]

    def reason(name: str) -> str:
        size, sha256 = files[name]
        try:
            size_now, sha256_now = digest(folder / name)
        except OSError as error:
            return one_line(error)
        if size_now != size:
            return f"has {size_now} bytes instead of {size}"
        return "" if sha256_now == sha256 else "its bytes have changed"

    checked = map_threads(reason, files, chunk=1)
    reasons = tqdm(checked, "checking files", len(files), mininterval=10)
    return sorted((name, why) for name, why in zip(files, reasons, strict=True) if why)
