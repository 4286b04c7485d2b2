"""Starting points for fine-tuning: from a path to parameters that fit the model."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import jax

from vit_jax.checkpoint import restore_params
from vit_jax.errors import UserError
from vit_jax.pretrained.adapt import adapt_params
from vit_jax.pretrained.npz import read_npz
from vit_jax.tree import flatten_names, is_scanned, stack_blocks, unflatten_names, unstack_blocks

PARAMS_FILE = "params.npz"
MODEL_FILE = "model.json"


def read_params(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Parameters from a work directory, one of its checkpoints, or an `.npz`; loop form, float32.

    A work directory gives its finished `params.npz`, or else its newest checkpoint that verifies.

    Raises:
      UserError: nothing there, or nothing that can be read.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"pretrained.path={str(path)!r} does not exist; give an .npz file, a work directory, "
            "or a folder WORKDIR/checkpoints/STEP."
        )
    if path.is_file():
        return unstack_blocks(read_npz(path))
    if (path / PARAMS_FILE).exists():
        return unstack_blocks(read_npz(path / PARAMS_FILE))
    return unstack_blocks(restore_params(str(path)))


def stored_grid(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Rows and columns of tokens that a run of ours wrote in `model.json`, near `path`."""
    path = Path(path)
    for folder in (path, *list(path.parents)[:2]):
        file = folder / MODEL_FILE
        if file.is_file():
            try:
                height, width = json.loads(file.read_text())["grid"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"cannot read the grid of tokens from {file}: {error}.") from error
            return int(height), int(width)
    return None


def load_pretrained(
    path: str | os.PathLike[str],
    like: Any,
    *,
    target_grid: tuple[int, int],
    grid: tuple[int, int] | None = None,
    reset_head: bool = True,
) -> dict[str, Any]:
    """Reads `path` and adapts it to `like` (see `adapt_params`).

    Args:
      path: see `read_params`.
      like: parameter tree of a freshly initialised model, either form of the blocks.
      target_grid: rows and columns of tokens of that model.
      grid: those of the file, where it is not a square and not a run of ours.
      reset_head: take the head from `like`; with False it must fit.

    Returns:
      A nested dict of numpy arrays with the structure and shapes of `like`; leaves that are reset
      are those of `like`, which may be mere shapes (jax.ShapeDtypeStruct).

    Raises:
      UserError: see `read_params` and `adapt_params`.
    """
    scanned = is_scanned(flatten_names(like))
    loaded = flatten_names(read_params(path))
    # Only shapes matter for what is loaded; what is reset is taken from `like` as it stands there.
    flat_like = flatten_names(jax.eval_shape(unstack_blocks, like))
    flat_like |= {name: leaf for name, leaf in flatten_names(like).items() if name in flat_like}
    source_grid = (grid[0], grid[1]) if grid else stored_grid(path)
    flat, report = adapt_params(
        loaded, flat_like, grid=target_grid, source_grid=source_grid, reset_head=reset_head
    )
    logging.info("%s: %s.", path, report)
    tree = unflatten_names(flat)
    return stack_blocks(tree) if scanned else tree
