"""The decoder of a masked autoencoder: facebookresearch/mae's names, and transformers'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.files.paths import reading
from vit_jax.models.description import Description
from vit_jax.models.later.mae import DECODER_BLOCKS, DECODER_POSITIONS
from vit_jax.pretrained.formats.rows import Row, encoder_block, layer, norm, numbers
from vit_jax.pretrained.formats.stored import positive

HEADS = 16  # of every published decoder


def decoder_rows(
    names: Iterable[str], blocks: str, parts: str, settings: Mapping[str, Any], key: str
) -> list[Row]:
    """The rows of a decoder whose arrays are among `names`, of a file or of ours.

    `blocks` is their name of a block without its number, `parts` names its parts (see
    `encoder_block`), and `settings[key]` its number of heads (UserError: not a positive int).
    """
    with reading("config.json"):
        num_heads = positive(settings.get(key, HEADS))
    prefix = blocks.rpartition("decoder_")[0]
    rows = [
        Row(("mask_token",), f"{prefix}mask_token"),
        Row((DECODER_POSITIONS,), f"{prefix}decoder_pos_embed"),
        *layer("decoder_embed", f"{prefix}decoder_embed"),
        *norm("decoder/encoder_norm", f"{prefix}decoder_norm"),
        *layer("decoder_pred", f"{prefix}decoder_pred"),
    ]
    for (i,) in numbers(rf"^(?:{blocks}\.|{DECODER_BLOCKS}_)(\d+)[./]", names):
        rows += encoder_block(i, f"{blocks}.{i}", parts, DECODER_BLOCKS, num_heads)
    return rows


def check_square(format: str, description: Description) -> None:
    """UserError unless patches and image are square, as the decoders of others need."""
    (height, width), patch = description.grid, description.model["patch_size"]
    if height != width or not isinstance(patch, int):
        raise UserError(
            f"--format={format} cannot store model.name='mae' for {height}x{width} patches of "
            f"{patch} pixels: it has square images and patches; use --format=npz or orbax."
        )
