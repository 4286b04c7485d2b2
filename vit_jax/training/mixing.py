"""Mixup and CutMix: every image is mixed with another one of the same batch, inside the step.

The partner is the previous row of the global batch (as in big_vision; timm reverses the
batch). `repeated_augmentation` separates copies of an example, so partners are other examples.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.objectives.objective import Batch, scale_images

Mixing = Callable[[Batch, jax.Array], Batch]


def create_mixing(
    *,
    mixup_alpha: float = 0.0,
    cutmix_alpha: float = 0.0,
    probability: float = 1.0,
    cutmix_probability: float = 0.5,
    per_example: bool = False,
    labels: bool = True,
) -> Mixing | None:
    """A function (batch, rng) -> mixed batch, or None if both alphas are 0.

    Mixup (1710.09412): weight * image + (1 - weight) * other, with weight = max(l, 1 - l) and
    l ~ Beta(alpha, alpha), as in AugReg, so that the image's own label has the larger weight.
    CutMix (1905.04899, algorithm A1): pastes a box of the other image whose sides are sqrt(1 - l)
    of the image's and whose centre is any pixel, cropped at the border; the weight is the
    remaining share of the image.

    The function takes `image` [B, H, W, C] (uint8 is scaled to [-1, 1] first, to avoid rounding),
    `label` [B] and `mask` [B]. It returns float images, and adds
      `other_label` [B]: the partner's label,
      `label_weight` [B] float32: the weight of `label`; `other_label` gets 1 - label_weight.
    A row whose partner is padding (mask 0) is not mixed. The papers draw coefficient, kind and box
    once per batch; AugReg's mixup_alpha is 0.2 to 0.8, DeiT's 0.8 with a cutmix_alpha of 1.

    Args:
      cutmix_probability: of CutMix when mixing, if both alphas are positive.
      per_example: draw for each example.
      labels: whether the objective reads any; a UserError if it does not.
    """
    idle: list[tuple[str, float, float]] = []  # keys without effect: value, default
    if not (mixup_alpha and cutmix_alpha):
        idle.append(("cutmix_probability", cutmix_probability, 0.5))
        cutmix_probability = 1.0 if cutmix_alpha else 0.0
    if not (mixup_alpha or cutmix_alpha):
        idle += [("probability", probability, 1.0), ("per_example", per_example, False)]
    for key, value, default in idle:
        if value != default:
            both = f"mix.mixup_alpha={mixup_alpha} and mix.cutmix_alpha={cutmix_alpha}"
            raise UserError(f"mix.{key}={value} has no effect with {both}; leave it at {default}.")
    if not (mixup_alpha or cutmix_alpha):
        return None
    if not labels:
        text = "mix.* mixes images with their labels, which this objective does not read"
        raise UserError(f"{text}; set both alphas to 0.")

    def mixing(batch: Batch, rng: jax.Array) -> Batch:
        images = scale_images(batch["image"])
        num_rows, height, width = images.shape[:3]
        draws = (num_rows if per_example else 1,)
        keys = jax.random.split(rng, 5)
        # [n, H, W]: the share of the image itself at each pixel; n is 1 or B.
        own = jnp.ones((*draws, 1, 1))
        weight = jnp.ones(draws)  # [n]
        if mixup_alpha:
            coefficient = jax.random.beta(keys[0], mixup_alpha, mixup_alpha, draws)
            weight = jnp.maximum(coefficient, 1.0 - coefficient)
            own = weight[:, None, None]
        if cutmix_alpha:
            coefficient = jax.random.beta(keys[1], cutmix_alpha, cutmix_alpha, draws)
            box = random_boxes(keys[2], coefficient, height, width)  # [n, H, W]
            cut = jax.random.bernoulli(keys[3], cutmix_probability, draws)  # [n]
            left = 1.0 - jnp.sum(box, axis=(1, 2)) / (height * width)
            weight = jnp.where(cut, left, weight)
            own = jnp.where(cut[:, None, None], 1.0 - box, own)
        mixes = jax.random.bernoulli(keys[4], probability, draws)
        mixes = mixes & (_partner(batch["mask"]) > 0)  # [B]
        own = jnp.where(mixes[:, None, None], own, 1.0)[..., None]  # [B, H, W, 1] or [B, 1, 1, 1]
        return {
            **batch,
            # Raw pixels move between devices, a quarter of the bytes.
            "image": own * images + (1.0 - own) * scale_images(_partner(batch["image"])),
            "other_label": _partner(batch["label"]),
            "label_weight": jnp.where(mixes, weight, 1.0),
        }

    return mixing


def random_boxes(rng: jax.Array, coefficients: jax.Array, height: int, width: int) -> jax.Array:
    """CutMix's boxes for coefficients [n]: float32 [n, H, W], 1 inside and 0 outside.

    Sides are sqrt(1 - coefficient) of the image's, halved and rounded down to pixels; the centre is
    any pixel.
    """
    ratio = jnp.sqrt(1.0 - coefficients)

    def inside(rng: jax.Array, side: int) -> jax.Array:
        half = jnp.floor(side * ratio).astype(jnp.int32) // 2  # [n]
        middle = jax.random.randint(rng, coefficients.shape, 0, side)
        place = jnp.arange(side)[None]  # [1, side]
        return (place >= (middle - half)[:, None]) & (place < (middle + half)[:, None])

    rng_y, rng_x = jax.random.split(rng)
    rows, columns = inside(rng_y, height), inside(rng_x, width)  # [n, H], [n, W]
    return jnp.asarray(rows[:, :, None] & columns[:, None, :], jnp.float32)  # [n, H, W]


def _partner(x: jax.Array) -> jax.Array:
    """Row i - 1 for row i; the last for the first."""
    return jnp.roll(x, 1, axis=0)
