"""The layers of the models, in Flax's words; `kernels/` has what makes them fast."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.interpolation import half_pixel_linear
from vit_jax.models.kernels.elementwise import gelu as gelu
from vit_jax.models.kernels.elementwise import normalize, per_feature, random_words, residual
from vit_jax.models.kernels.products import convolve_patches, dot_general
from vit_jax.models.tokens import patch_shape
from vit_jax.patches import Layout, Patches

# What the forward pass saves; the backward pass recomputes the rest.
REMAT_POLICIES: dict[str, Any] = {
    "none": None,  # everything is saved
    "full": jax.checkpoint_policies.nothing_saveable,  # only each block's input
    # Outputs of dense layers and attention; scores, norms and activations are cheap to recompute.
    "dots": jax.checkpoint_policies.save_only_these_names("dense", "attention"),
    "dots_with_no_batch_dims": jax.checkpoint_policies.save_only_these_names("dense"),
}


# x W + b, W Xavier uniform as in the official code's blocks.
Dense = functools.partial(
    nn.Dense, kernel_init=nn.initializers.xavier_uniform(), dot_general=dot_general
)


def head(num_classes: int, bias: float, name: str = "head") -> nn.Module:
    """x W + b with logits [..., K] in float32; W is 0 at the start, and b this number."""
    zeros, constant = nn.initializers.zeros_init(), nn.initializers.constant(bias)
    return nn.Dense(num_classes, kernel_init=zeros, bias_init=constant, name=name)


def per_pixel(model: Any, x: jax.Array, images: Any) -> jax.Array:
    """A dense model's logits of patches, [B, h*w, K], to those of all pixels, [B, H, W, K].

    Linear between the centres of the patches, as PyTorch's `interpolate(mode="bilinear")`. Other
    outputs are returned as they are.
    """
    if model.outputs_per != "pixel" or not model.num_classes:
        return x
    shape, cell = images.shape[1:3], model.pixels_per_token
    grid = shape[0] // cell[0], shape[1] // cell[1]
    rows, columns = (half_pixel_linear(*sizes) for sizes in zip(grid, shape, strict=True))
    x = jnp.reshape(x, (x.shape[0], *grid, x.shape[-1]))  # [B, h, w, K]
    x = jnp.einsum("Hh,bhwk->bHwk", jnp.asarray(rows, x.dtype), x, precision="highest")
    return jnp.einsum("Ww,bHwk->bHWk", jnp.asarray(columns, x.dtype), x, precision="highest")


def embed_patches(
    model: Any, images: jax.Array, name: str = "embedding", **options: Any
) -> jax.Array:
    """A convolution whose windows are a model's patches: [B, H, W, C] -> [B, h, w, D]."""
    patch = patch_shape(model.patch_size)
    sizes = model.hidden_size, patch, patch, "VALID"
    conv = functools.partial(nn.Conv, conv_general_dilated=convolve_patches, dtype=model.dtype)
    return conv(*sizes, name=name, **options)(jnp.asarray(images, model.dtype))


def embed_tokens(
    model: Any, images: jax.Array | Patches, **options: Any
) -> tuple[jax.Array, tuple[int, int], Layout | None]:
    """x_p E of equation 1, [B, N, D]; the grid of the positions, and a layout if it is another.

    `images` [B, H, W, C], or in shapes of their own.
    """
    if isinstance(images, Patches):
        if model.position_grid is None:
            raise UserError(
                "model.position_grid=None; images in shapes of their own need the rows and columns "
                "of the positions, such as (16, 16)."
            )
        (batch_size, count, _), (height, width) = images.pixels.shape, patch_shape(model.patch_size)
        columns = jnp.reshape(images.pixels, (batch_size, count * height, width, -1))
        x = embed_patches(model, columns, **options)[:, :, 0]  # [B, N, D]
        return x, model.position_grid, images.layout
    x = embed_patches(model, images, **options)  # [B, h, w, D]
    grid = (x.shape[1], x.shape[2])
    x = jnp.reshape(x, (x.shape[0], -1, x.shape[-1]))
    if model.position_grid in (None, grid):
        return x, grid, None
    grids = jnp.broadcast_to(jnp.array([grid], jnp.int32), (x.shape[0], 2))
    return x, model.position_grid, Layout(grids, x.shape[1], is_padded=False)


def token_mean(x: jax.Array, layout: Layout | None, dtype: Any = None) -> jax.Array:
    """Over the tokens that are real: [B, N, D] -> [B, D]."""
    mask = layout.mask(x.shape[1]) if layout else None
    where = None if mask is None else mask[..., None]
    return jnp.mean(x, axis=1, where=where, dtype=dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over features: [..., D] -> [..., D].

    In float32, as in Flax's layer of the same name, with one rounding to `dtype` at the end.
    """

    epsilon: float = 1e-6
    dtype: Any = jnp.float32
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],))
        zeros = nn.initializers.zeros_init()
        bias = self.param("bias", zeros, (x.shape[-1],)) if self.use_bias else jnp.zeros(())
        return normalize(x, scale, bias, self.epsilon).astype(self.dtype)


class BatchNorm(nn.Module):
    """(x - mean) / sqrt(var + epsilon) * scale + bias per channel: [B, ..., C] -> [B, ..., C].

    Training takes mean and variance from the batch, over all devices, and stores their running
    averages as new values of `mean` and `var` in the collection `buffers`, as PyTorch computes
    them; everything else reads these two. They are among the parameters, in rows with
    `is_statistic`, and have no gradient. In float32, with one rounding to `dtype` at the end.

    Attributes:
      train: whether this is training with the statistics of the batch.
      momentum: of the running averages.
      affine: whether there are `scale` and `bias`.
    """

    train: bool
    epsilon: float = 1e-5
    momentum: float = 0.9
    affine: bool = True
    dtype: Any = jnp.float32
    scale_init: Any = nn.initializers.ones_init()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        zeros, ones = nn.initializers.zeros_init(), nn.initializers.ones_init()
        inits = {"mean": zeros, "var": ones}
        inits |= {"scale": self.scale_init, "bias": zeros} if self.affine else {}
        params = {name: self.param(name, init, x.shape[-1:]) for name, init in inits.items()}
        x = jnp.asarray(x, jnp.float32)
        mean, variance = jax.lax.stop_gradient((params["mean"], params["var"]))
        if self.train and not self.is_initializing():
            running = {"mean": mean, "var": variance}
            axes = tuple(range(x.ndim - 1))
            mean, variance = jnp.mean(x, axes), jnp.var(x, axes)
            self._store(running, mean, variance, x.size // x.shape[-1])
        mean, variance = per_feature(mean, x.ndim), per_feature(variance, x.ndim)
        x = (x - mean) * jax.lax.rsqrt(variance + self.epsilon)
        if self.affine:
            scale, bias = (per_feature(params[name], x.ndim) for name in ("scale", "bias"))
            x = x * scale + bias
        return x.astype(self.dtype)

    def _store(self, running: Any, mean: jax.Array, variance: jax.Array, count: int) -> None:
        if not self.is_mutable_collection("buffers"):
            raise UserError(
                "this objective does not keep the statistics of the model's batch norms; use "
                "classification or distillation, or model.frozen_norms=True."
            )
        # The average is of the unbiased estimate, as in PyTorch.
        batch = {"mean": mean, "var": variance * (count / max(count - 1, 1))}
        for name, value in jax.lax.stop_gradient(batch).items():
            average = self.momentum * running[name] + (1.0 - self.momentum) * value
            self.put_variable("buffers", name, average)


class Dropout(nn.Module):
    """Sets features to 0 with probability `rate` in training, and divides the others by 1 - rate.

    [..., D] -> [..., D]; needs the random stream `dropout`.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
        if deterministic or not self.rate:
            return x
        words = random_words(self.make_rng("dropout"), x.shape)
        kept = words >= jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))
        # Divided in float32: rounding 0.9 to bfloat16 would scale training by 0.2 %.
        return jnp.where(kept, jnp.asarray(x, jnp.float32) / (1.0 - self.rate), 0.0).astype(x.dtype)


def drop_rates(rate: float, num_layers: int, shape: str = "linear") -> np.ndarray | None:
    """Float32 [L]: `linear` from 0 for the first block to `rate` for the last, or `constant`.

    None for rate 0.
    """
    rates = rate * np.arange(num_layers) / max(num_layers - 1, 1)
    rates = np.full(num_layers, rate) if shape == "constant" else rates
    return rates.astype(np.float32) if rate else None


class StochasticDepth(nn.Module):
    """Drops a residual branch for single examples (1603.09382): [B, ...] -> [B, ...].

    Each example and each branch (attention and MLP) is drawn separately, as in timm's DropPath and
    scenic. Kept values are divided by the probability of keeping them, as in timm and unlike
    scenic, so that evaluation needs no scaling.
    """

    @nn.compact
    def __call__(self, x: jax.Array, rate: Any, *, deterministic: bool) -> jax.Array:
        """`rate`: a number, possibly traced as under a scan; None disables it."""
        if deterministic or rate is None:
            return x
        keep = 1.0 - jnp.asarray(rate, jnp.float32)
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, shape)  # [B, 1, ...]
        # Divided in float32, as above.
        return jnp.where(kept, jnp.asarray(x, jnp.float32) / keep, 0.0).astype(x.dtype)


def add_branch(x: jax.Array, y: jax.Array, drop_rate: Any, *, train: bool) -> jax.Array:
    """x + y with stochastic depth: twice [B, ..., D] -> the same shape."""
    return residual(x, StochasticDepth()(y, drop_rate, deterministic=not train))


def loop_of(module: Any) -> dict[str, Any]:
    """The arguments of `apply_blocks` that a module has as attributes."""
    depth = "num_layers", "stochastic_depth_rate", "stochastic_depth_shape"
    return {k: getattr(module, k) for k in (*depth, "remat", "scan") if hasattr(module, k)}


def apply_blocks(
    create_block: Callable[..., nn.Module],
    x: jax.Array,
    *shared: Any,
    name: str,
    train: bool,
    num_layers: int,
    stochastic_depth_rate: float = 0.0,
    stochastic_depth_shape: str = "linear",
    remat: str = "none",
    scan: bool = False,
) -> jax.Array:
    """Blocks `NAME_0`, `NAME_1`, ... of the module in whose compact `__call__` this is called.

    With `scan` XLA compiles one block as the body of a loop; its parameters are those of the loop
    form stacked along a leading axis (`ParameterTable.stack`).

    Args:
      create_block: called with `name`; the block as `block(x, drop_rate, *shared, train=train)`.
      x: [B, N, D], like the result.
      shared: the same for all blocks.
      num_layers, ...: see `loop_of`.
    """

    def apply_block(block: nn.Module, x: jax.Array, drop_rate: Any) -> jax.Array:
        x = block(x, drop_rate, *shared, train=train)
        # Left to itself, XLA may shard features; with 2x2x2 devices it then got gradients wrong.
        return nn.with_logical_constraint(x, ("batch", None, None))

    if remat != "none":
        # Inside a scan, the loop itself prevents XLA from merging the two forward passes.
        apply_block = nn.remat(apply_block, prevent_cse=not scan, policy=REMAT_POLICIES[remat])
    rates = drop_rates(stochastic_depth_rate, num_layers, stochastic_depth_shape)  # [L], or None
    if not scan:
        for i in range(num_layers):
            block = create_block(name=f"{name}_{i}")
            x = apply_block(block, x, None if rates is None else rates[i])
        return x
    loop = nn.scan(
        lambda block, x, drop_rate: (apply_block(block, x, drop_rate), None),
        variable_axes={"params": 0, "intermediates": 0},
        split_rngs={"params": True, "dropout": True},
        length=num_layers,
    )
    x, _ = loop(create_block(name=name), x, rates)
    return x


class IdentityLayer(nn.Module):
    """Names a value among the intermediates."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x
