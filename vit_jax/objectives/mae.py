"""Masked autoencoding (He et al., 2111.06377): from a quarter of the patches to the pixels of all.

Every image loses the same number of patches, chosen uniformly; its loss is the mean squared error
of the pixels of these patches (section 3). The loss of a batch is the mean over its images.
"""

from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.objectives.objective import Batch, Metrics, Objective, Task, masked_mean, scale_images
from vit_jax.objectives.patches import pixel_seeds, split_patches


class MaskedAutoencoding(Objective):
    """Predicts the pixels of masked patches; needs no labels."""

    example_keys = ("image",)
    predicts_pixels = True
    num_outputs = 0  # the decoder has outputs of its own

    def __init__(self, task: Task, *, mask_ratio: float = 0.75, norm_pix_loss: bool = True):
        """
        Args:
          task: its model is a masked autoencoder, `model.name="mae"`.
          mask_ratio: share of the patches that only the decoder sees, as mask tokens.
          norm_pix_loss: predict pixels less their patch's mean, divided by their deviation, as the
            published models do (section 3); False: the pixels.

        Raises:
          UserError: another model, or a share that masks or leaves no patch.
        """
        super().__init__()
        self.model = task.build_model(self.num_outputs)
        if not hasattr(self.model, "decoder_num_layers"):
            raise UserError(
                "objective.name='mae' needs a decoder: set model.name to 'mae', or a variant such "
                "as MAE-B/16; the result is fine-tuned as a Vision Transformer."
            )
        height, width = self.model.token_grid(task.image_shape[:2])
        self._num_patches = height * width
        # The authors' code rounds down too.
        self._num_visible = int(self._num_patches * (1.0 - mask_ratio))
        if not 0 < self._num_visible < self._num_patches:
            raise UserError(
                f"objective.mask_ratio={mask_ratio} shows {self._num_visible} of an image's "
                f"{self._num_patches} patches to the encoder: it needs one, and one to predict."
            )
        self._normalize = norm_pix_loss

    def init(self, rng: jax.Array, batch: Batch) -> Any:
        images = scale_images(batch["image"])
        corruption = self.corruption(jnp.zeros((len(images), self._num_patches)))
        return self.model.init(rng, images, train=False, corruption=corruption)["params"]

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        """Mean over the images of the batch."""
        drop_rng, mask_rng = jax.random.split(rng)
        images = scale_images(batch["image"])
        noise = jax.random.uniform(mask_rng, (len(images), self._num_patches))
        losses = self.losses(params, images, noise, {"dropout": drop_rng}, train=True)
        return masked_mean(losses, batch["mask"]), {}

    def evaluate(self, params: Any, batch: Batch) -> Metrics:
        """[B]; what is masked is a function of the image's pixels only."""
        images = scale_images(batch["image"])
        draw = jax.vmap(lambda seed: jax.random.uniform(jax.random.key(seed), (self._num_patches,)))
        return {"loss": self.losses(params, images, draw(pixel_seeds(images)), {}, train=False)}

    def corruption(self, noise: jax.Array) -> Batch:
        """What the model sees for noise [B, P]: the patches of the smallest numbers are visible."""
        order = jnp.argsort(noise, axis=1)
        return {"visible": order[:, : self._num_visible], "restore": jnp.argsort(order, axis=1)}

    def losses(
        self, params: Any, images: jax.Array, noise: jax.Array, rngs: Any, *, train: bool
    ) -> jax.Array:
        """Mean squared error over the masked patches of each image, [B]."""
        corruption = self.corruption(noise)
        pixels = self.model.apply(
            {"params": params}, images, train=train, corruption=corruption, rngs=rngs
        )
        targets = split_patches(images, self.model.pixels_per_token)  # [B, P, h, w, C]
        targets = jnp.reshape(targets, pixels.shape)  # [B, P, h*w*C]
        if self._normalize:
            mean = jnp.mean(targets, axis=-1, keepdims=True)
            variance = jnp.var(targets, axis=-1, keepdims=True, ddof=1)
            targets = (targets - mean) / jnp.sqrt(variance + 1e-6)
        errors = jnp.mean(jnp.square(pixels - targets), axis=-1)  # [B, P]
        masked = jnp.asarray(corruption["restore"] >= self._num_visible, jnp.float32)
        return jnp.sum(errors * masked, axis=1) / (self._num_patches - self._num_visible)
