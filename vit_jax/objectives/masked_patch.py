"""Masked patch prediction, the paper's self-supervision (section 4.6 and appendix B.1.2).

Some patch embeddings are corrupted before positions are added, and the model predicts the pixels of
those patches from the output tokens there. The authors released no code. Where the paper is
silent we chose: patches are corrupted independently; a random patch is another one of the same
image; colour bins have equal width; the loss is the mean over the corrupted patches of the batch
(with accumulation, of each part: parts of 64 images of 196 patches differ by about 1 % in
their number of corrupted patches, and so in the weight of a patch);
the learned [mask] embedding is initialized with a standard deviation of 0.02.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.objectives.objective import Batch, Metrics, Objective, Task, masked_mean, scale_images
from vit_jax.objectives.patches import pixel_seeds, split_patches

# Prediction targets, with the side of the patch in colour predictions (0: pixels instead). The
# paper's few-shot accuracy was best with the first; all worked.
TARGETS = {"mean_color": 1, "downsized": 4, "pixels": 0}
BINS = 8  # 3 bits per channel


class MaskedPatch(Objective):
    """Predicts the pixels of corrupted patches; needs no labels."""

    example_keys = ("image",)
    predicts_pixels = True

    def __init__(
        self,
        task: Task,
        *,
        target: str = "mean_color",
        corruption: float = 0.5,
        masked: float = 0.8,
        replaced: float = 0.1,
    ):
        """
        Args:
          task: its model has an output per token: a Vision Transformer with
            `classifier="token_unpooled"` or `"unpooled"`.
          target: `mean_color`, the mean 3-bit colour (512 classes for 3 channels); `downsized`, the
            3-bit colours of the patch at 4x4 pixels (16 predictions of 512 classes); `pixels`, all
            values of the patch, with an L2 loss.
          corruption: share of patches to corrupt; the paper also tried 0.15.
          masked: share of the corrupted patches that become the [mask] embedding.
          replaced: share that becomes the embedding of a random patch; the rest is kept.

        Raises:
          UserError: unknown target, shares outside [0, 1], a model without an output per patch, or
            patches that cannot be downsized.
        """
        super().__init__()
        check_known("objective.target", target, TARGETS)
        if not 0.0 < corruption <= 1.0:
            raise UserError(f"objective.corruption={corruption} must be in (0, 1].")
        if min(masked, replaced) < 0.0 or masked + replaced > 1.0:
            raise UserError(
                f"objective.masked={masked} and objective.replaced={replaced} are shares of the "
                "corrupted patches: they must not be negative, and add up to at most 1."
            )
        self._corruption, self._masked, self._replaced = corruption, masked, replaced
        channels = task.image_shape[-1]
        num_colors = BINS**channels
        self.measures = ("loss",) if target == "pixels" else ("loss", "accuracy")
        probe = task.build_model(num_colors)
        if probe.outputs_per != "token":
            raise UserError(
                "objective.name='masked_patch' predicts every patch: use a Vision Transformer "
                "with model.classifier='token_unpooled' (fine-tuned with 'token'), or 'unpooled' "
                "(with 'gap')."
            )
        height, width = self._patch = probe.pixels_per_token
        side = self._side = TARGETS[target]
        if side and (height % side or width % side):
            raise UserError(
                f"objective.target={target!r} shrinks patches of {height}x{width} pixels to "
                f"{side}x{side}, which needs sides divisible by that; use 'mean_color'."
            )
        self.num_outputs = side**2 * num_colors if side else height * width * channels
        self.model = task.build_model(self.num_outputs)

    def init(self, rng: jax.Array, batch: Batch) -> Any:
        images = scale_images(batch["image"])
        _, corruption = self._draw(rng, images)
        return self.model.init(rng, images, train=False, corruption=corruption)["params"]

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        """Mean over the corrupted patches of the batch; `accuracy` of the colours."""
        drop_rng, draw_rng = jax.random.split(rng)
        images = scale_images(batch["image"])
        corrupted, corruption = self._draw(draw_rng, images)
        values = self._values(params, images, corruption, {"dropout": drop_rng}, train=True)
        weights = corrupted * batch["mask"][:, None]  # [B, P]
        total = jnp.maximum(jnp.sum(weights), 1.0)
        means = {name: jnp.sum(value * weights) / total for name, value in values.items()}
        return means.pop("loss"), means

    def evaluate(self, params: Any, batch: Batch) -> Metrics:
        """Means over the corrupted patches of each image (over all if there are none), [B].

        The corruption is a function of the image's pixels only.
        """
        images = scale_images(batch["image"])
        draw = jax.vmap(lambda seed, image: self._draw(jax.random.key(seed), image[None]))
        corrupted, corruption = jax.tree.map(lambda x: x[:, 0], draw(pixel_seeds(images), images))
        values = self._values(params, images, corruption, {}, train=False)
        weights = jnp.where(jnp.any(corrupted > 0, axis=1, keepdims=True), corrupted, 1.0)  # [B, P]
        return {name: jax.vmap(masked_mean)(value, weights) for name, value in values.items()}

    def _draw(self, rng: jax.Array, images: jax.Array) -> tuple[jax.Array, Batch]:
        """Which patches are corrupted (1.0 or 0.0), and how, for the model: [B, P] each.

        `masked`: whether the [mask] embedding replaces it; `source`: the patch whose embedding it
        gets otherwise, usually its own.
        """
        height, width = self._patch
        shape = (images.shape[0], (images.shape[1] // height) * (images.shape[2] // width))
        which, how, where = jax.random.split(rng, 3)
        corrupted = jax.random.bernoulli(which, self._corruption, shape)
        kind = jax.random.uniform(how, shape)
        replaced = (kind >= self._masked) & (kind < self._masked + self._replaced)
        own = jnp.broadcast_to(jnp.arange(shape[1]), shape)
        # Another patch: a shift of 1 to P - 1, modulo P.
        step = jax.random.randint(where, shape, 1, max(shape[1], 2))
        source = jnp.where(corrupted & replaced, (own + step) % shape[1], own)
        masked = corrupted & (kind < self._masked)
        return jnp.asarray(corrupted, jnp.float32), {"masked": masked, "source": source}

    def _values(
        self, params: Any, images: jax.Array, corruption: Batch, rngs: Any, *, train: bool
    ) -> Metrics:
        """Loss, and accuracy if the target is a class, of every patch: [B, P] each."""
        outputs = self.model.apply(
            {"params": params}, images, train=train, corruption=corruption, rngs=rngs
        )
        outputs = outputs[:, len(self.model.prefix_tokens) :]  # [B, P, K]
        patches = split_patches(images, self._patch)  # [B, P, h, w, C]
        if not self._side:
            targets = jnp.reshape(patches, outputs.shape)
            return {"loss": jnp.mean(jnp.square(outputs - targets), axis=-1)}
        batch_size, count, height, width, channels = patches.shape
        sides = (self._side, height // self._side, self._side, width // self._side)
        cells = jnp.reshape(patches, (batch_size, count, *sides, channels))
        colors = jnp.mean(cells, axis=(3, 5))  # [B, P, side, side, C]
        targets = jnp.reshape(color_classes(colors), (batch_size, count, -1))  # [B, P, n]
        logits = jnp.reshape(outputs, (*targets.shape, -1))  # [B, P, n, 8**C]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        correct = jnp.asarray(jnp.argmax(logits, axis=-1) == targets, jnp.float32)
        return {"loss": jnp.mean(loss, axis=-1), "accuracy": jnp.mean(correct, axis=-1)}


def color_classes(colors: jax.Array) -> jax.Array:
    """Colours [..., C] in [-1, 1] -> int32 [...]: 3 bits per channel, the first is the highest."""
    bins = jnp.clip(jnp.floor((colors + 1.0) / 2.0 * BINS), 0, BINS - 1)
    classes = jnp.zeros(colors.shape[:-1])
    for channel in range(colors.shape[-1]):
        classes = classes * BINS + bins[..., channel]
    return jnp.asarray(classes, jnp.int32)
