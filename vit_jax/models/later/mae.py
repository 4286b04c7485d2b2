"""The masked autoencoder of "Masked Autoencoders Are Scalable Vision Learners" (2111.06377).

A Vision Transformer encodes the visible patches only; from them a narrow decoder, which is used in
pre-training alone, predicts the pixels of all patches (section 3). The encoder's parameters are
those of `VisionTransformer`, as which it is fine-tuned. B: batch, P: patches, V: visible patches,
D: hidden size, E: the decoder's.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.models.family import LAST, Row, Shapes, dense_rows, layer_width
from vit_jax.models.layers import Dense, embed_patches, loop_of
from vit_jax.models.tokens import patch_shape, sincos


def sincos_table(grid: tuple[int, int], width: int) -> np.ndarray:
    """Fixed positions of the authors' code: [1, 1 + h*w, width] float32, 0 for the class token.

    `sincos` with w_k = 10,000^(-4k / width); `sincos2d` has other frequencies.
    """
    omega = 10_000.0 ** (-np.arange(width // 4) / (width // 4))
    return np.pad(sincos(grid, omega), ((1, 0), (0, 0)))[None].astype(np.float32)


class FixedPositions(nn.Module):
    """`sincos_table` as a parameter, which fine-tuning alone trains: width D -> [1, 1 + h*w, D]."""

    grid: tuple[int, int]

    @nn.compact
    def __call__(self, width: int) -> jax.Array:
        table = self.param("pos_embedding", lambda _: sincos_table(self.grid, width))
        return jax.lax.stop_gradient(jnp.asarray(table))


class PartialEncoder(vit.Encoder):
    """`Encoder` with fixed positions, on some of the tokens: [B, 1 + h*w, D] -> [B, N, D]."""

    grid: tuple[int, int] = (0, 0)

    @nn.compact
    def __call__(  # type: ignore[override]
        self, x: jax.Array, kept: Any = None, *, train: bool
    ) -> jax.Array:
        """`kept` [B, N]: numbers of the tokens to encode; None: all."""
        positions = FixedPositions(self.grid, name="posembed_input")(x.shape[-1])
        if kept is not None:
            x = jnp.take_along_axis(x, kept[..., None], axis=1)  # [B, N, D]
            positions = positions[0, kept]  # [B, N, D]
        return super().__call__(x, positions, train=train)


class MaskedAutoencoder(vit.VisionTransformer):
    """Images to logits, as `VisionTransformer` with a class token, or to the pixels of all patches.

    Its other attributes are those of `VisionTransformer`, with the `choices` of `FAMILY`.

    Attributes:
      decoder_hidden_size, decoder_num_layers, decoder_mlp_dim, decoder_num_heads: sizes of the
        decoder; the defaults are the paper's (section 4.1: 8 blocks of width 512).
    """

    decoder_hidden_size: int = 512
    decoder_num_layers: int = 8
    decoder_mlp_dim: int = 2048
    decoder_num_heads: int = 16

    kind = "mae"

    @nn.compact
    def __call__(  # type: ignore[override]
        self, images: jax.Array, *, train: bool, corruption: dict[str, jax.Array] | None = None
    ) -> jax.Array:
        """[B, H, W, C] -> logits [B, K] float32; with `corruption` pixels [B, P, h*w*C] float32.

        `corruption` has `visible` [B, V], numbers of the patches to encode, and `restore` [B, P],
        the place of each patch in the list of visible patches followed by masked ones.
        """
        # As a dense layer on the pixels of a patch (the authors' code).
        init = nn.initializers.xavier_uniform(in_axis=(0, 1, 2), out_axis=3)
        x = embed_patches(self, images, kernel_init=init)  # [B, h, w, D]
        grid = (x.shape[1], x.shape[2])
        x = jnp.reshape(x, (x.shape[0], -1, x.shape[3]))  # [B, P, D]
        x = jnp.concatenate([self._tokens("cls", x, 1), x], axis=1)  # [B, 1 + P, D]
        kept = None if corruption is None else _with_class_token(corruption["visible"])
        encoder = PartialEncoder(
            vit.BlockConfig.of(self), **loop_of(self), grid=grid, name="Transformer"
        )
        x = encoder(x, kept, train=train)  # [B, 1 + V, D]
        if corruption is not None:
            return self._decode(x, corruption["restore"], grid, images.shape[-1], train=train)
        if self.is_initializing():  # an encoder without its decoder is a VisionTransformer
            self._decode(x, jnp.arange(x.shape[1] - 1)[None], grid, images.shape[-1], train=train)
        return self._classify(x[:, 0], train=train)

    def _decode(
        self, x: jax.Array, restore: jax.Array, grid: tuple[int, int], channels: int, *, train: bool
    ) -> jax.Array:
        """Encoded tokens [B, 1 + V, D] -> pixels [B, P, h*w*C] float32."""
        c = dataclasses.replace(
            vit.BlockConfig.of(self), mlp_dim=self.decoder_mlp_dim, num_heads=self.decoder_num_heads
        )
        x = Dense(self.decoder_hidden_size, dtype=self.dtype, name="decoder_embed")(x)
        masked = self._tokens("mask_token", x, 1 + restore.shape[1] - x.shape[1])
        x = jnp.concatenate([x, masked], axis=1)  # [B, 1 + P, E]
        x = jnp.take_along_axis(x, _with_class_token(restore)[..., None], axis=1)
        x = PartialEncoder(
            c, self.decoder_num_layers, remat=self.remat, scan=self.scan, grid=grid, name="decoder"
        )(x, train=train)
        height, width = patch_shape(self.patch_size)
        pixels = Dense(height * width * channels, name="decoder_pred")
        return pixels(jnp.asarray(x, jnp.float32))[:, 1:]  # [B, P, h*w*C]

    def _tokens(self, name: str, x: jax.Array, count: int) -> jax.Array:
        """Copies of a learned token, [B, count, D], for tokens x [B, N, D]."""
        token = self.param(name, nn.initializers.normal(0.02), (1, 1, x.shape[-1]))
        return jnp.tile(jnp.asarray(token, self.dtype), (x.shape[0], count, 1))


def _with_class_token(patches: jax.Array) -> jax.Array:
    """Numbers of patches [B, N] -> of the class token and their tokens [B, 1 + N]."""
    return jnp.pad(patches + 1, ((0, 0), (1, 0)))


DECODER_BLOCKS = "decoder/encoderblock"
DECODER_POSITIONS = "decoder/posembed_input/pos_embedding"


def infer(shapes: Shapes) -> dict[str, Any]:
    """See `Family.infer`."""
    decoder = {
        "hidden_size": layer_width(shapes, "decoder_embed"),
        **vit.infer_blocks(shapes, DECODER_BLOCKS),
    }
    return {**vit.infer(shapes), **{f"decoder_{key}": value for key, value in decoder.items()}}


def check(model: MaskedAutoencoder) -> None:
    """Raises UserError for incompatible attributes."""
    vit.check(model)
    width, heads = model.decoder_hidden_size, model.decoder_num_heads
    if width % heads or width % 4 or model.hidden_size % 4:
        raise UserError(
            f"model.decoder_hidden_size={width} must be divisible by model.decoder_num_heads="
            f"{heads}, and by 4 as model.hidden_size={model.hidden_size} (positions of two axes)."
        )


_DECODER = (
    Row("mask_token", (None, None, "embed"), LAST),
    Row(DECODER_POSITIONS, (None, None, "embed"), LAST),
    *dense_rows("decoder_embed", None, "embed", depth=LAST),
    *vit.attention_rows(rf"{DECODER_BLOCKS}(?:_(?P<block>\d+))?"),
    Row("decoder/encoder_norm/(?:scale|bias)", ("embed",), LAST),
    *dense_rows("decoder_pred", "embed", None, depth=LAST),
)

FAMILY = dataclasses.replace(
    vit.FAMILY,
    module=MaskedAutoencoder,
    any_shape=False,
    title="masked autoencoder (MAE, arXiv 2111.06377)",
    acronym="MAE",
    rows=(
        *(row for row in vit.FAMILY.rows if row.pattern != "mask_embedding"),  # it leaves them out
        *(dataclasses.replace(row, role="training") for row in _DECODER),
    ),
    infer=infer,
    # Positions are arrays of the file, as learned ones are.
    choices={
        **vit.FAMILY.choices,
        "classifier": ("token",),
        "position_embedding": ("learned",),
        "position_stddev": (vit.VisionTransformer.position_stddev,),  # fixed positions: never read
        "representation_size": (None,),
        "head_norm": (False,),
        "resnet_layers": (None,),
    },
    check=check,
    conventions=("gelu", "layer_norm_epsilon"),
    objective="mae",
)
