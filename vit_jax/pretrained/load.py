"""Starting points for fine-tuning: from a path to parameters that fit the model."""

from __future__ import annotations

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
from vit_jax.workdir import read_json

PARAMS_FILE = "params.npz"
MODEL_FILE = "model.json"
CHECKPOINTS = "checkpoints"


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
    """Rows and columns of tokens, from the `model.json` of the work directory that `path` is in.

    None for a file that is not the `params.npz` of a run of ours.
    """
    path = Path(path).absolute()
    if path.is_file():
        workdir = path.parent if path.name == PARAMS_FILE else None
    elif path.parent.name == CHECKPOINTS:
        workdir = path.parent.parent
    else:
        workdir = path.parent if path.name == CHECKPOINTS else path
    if workdir is None or not (workdir / MODEL_FILE).is_file():
        return None
    try:
        height, width = read_json(workdir / MODEL_FILE)["grid"]
        return int(height), int(width)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{workdir / MODEL_FILE} does not tell the grid of tokens ({error!r}); give it as "
            "pretrained.grid, or restore the file."
        ) from error


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
