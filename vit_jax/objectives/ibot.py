"""iBOT (2111.07832): DINO, and the same for patches that only the teacher sees.

Blocks of the student's large crops are masked; at each masked patch it learns what the teacher says
of that patch of the same crop. The op `block_masks` draws them: `masked_patches` [B, 2, M], their
numbers, or -1 where there are fewer than M. With `koleo_weight` and `centering="sinkhorn_knopp"`
this is the loss of DINOv2 (2304.07193, section 4), and with `gram_weight` that of DINOv3's second
phase (2508.10104, section 4). P: patches of a large crop.
"""

from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.objectives.dino import STUDENT, TEACHER, Dino, unit
from vit_jax.objectives.objective import Batch, Metrics, Task, masked_mean, scale_images

GRAM = "gram_teacher"


class Ibot(Dino):
    """`Dino`, plus the cross-entropy at the masked patches, a mean over those of each crop."""

    example_keys = (*Dino.example_keys, "masked_patches")

    def __init__(
        self,
        task: Task,
        *,
        patch_weight: float = 1.0,
        separate_head: bool = False,
        gram_weight: float = 0.0,
        gram_every_steps: int = 10_000,
        **kwargs: Any,
    ):
        """
        Args:
          patch_weight: of the patches' loss.
          separate_head: whether patches have a head of their own, of the same sizes.
          gram_weight: of `gram_loss` to a third model, which holds what the teacher was (DINOv3:
            2.0): similarities of patches stay as they were while the rest learns on.
          gram_every_steps: updates between its copies of the teacher; 0: it stays as at the start.
          **kwargs: of `Dino`.

        Raises:
          UserError: see `Dino`.
        """
        super().__init__(task, **kwargs)
        self._patch_weight, self._gram_weight = patch_weight, gram_weight
        self._gram_every_steps = gram_every_steps
        self._patch_head = "patch_head" if separate_head else "head"
        self._heads |= {self._patch_head: self._heads["head"]}
        self._centers = (*self._centers, "patch_center")

    @property
    def models(self) -> dict[str, Any]:
        return {**super().models, **({GRAM: self.model} if self._gram_weight else {})}

    def start_buffers(self, params: Any) -> dict[str, Any]:
        buffers = super().start_buffers(params)
        return {**buffers, GRAM: params[STUDENT]} if self._gram_weight else buffers

    def update(self, buffers: Any, params: Any, seen: Any) -> Any:
        new = super().update(buffers, params, seen)
        if self._gram_weight:
            every = self._gram_every_steps
            is_due = new["updates"] % every == 0 if every else jnp.zeros((), bool)
            new[GRAM] = jax.tree.map(
                lambda old, teacher: jnp.where(is_due, teacher, old), buffers[GRAM], new[TEACHER]
            )
        return new

    def embed(self, params: Any, batch: Batch, rng: jax.Array) -> Any:
        """Also, for `gram_loss`, all patches of the third model, [B, 2, P, D]."""
        seen = super().embed(params, batch, rng)
        if self._gram_weight:
            large = scale_images(jnp.stack([batch["image"], batch["image_2"]], axis=1))
            _, patches = self._view(params[GRAM], large, train=False)
            seen[GRAM] = jax.lax.stop_gradient(patches)
        return seen

    def _first_inputs(self, images: jax.Array) -> dict[str, Any]:
        height, width = self.model.token_grid(images.shape[1:3])
        return {"corruption": {"masked": jnp.zeros((len(images), height * width), bool)}}

    def _see(self, params: Any, large: jax.Array, batch: Batch, **options: Any) -> dict[str, Any]:
        """Also the masked `patches` [B, 2, M, D], and `real` [B, 2, M]: 1, or 0 for none."""
        numbers = batch["masked_patches"]
        if options["train"]:  # the student
            height, width = self.model.token_grid(large.shape[2:4])
            patches = jnp.arange(height * width)
            masked = jnp.any(numbers[..., None] == patches[None, None, None], axis=2)  # [B, 2, P]
            options["masked"] = jnp.reshape(masked, (-1, height * width))
        pooled, patches = self._view(params, large, **options)
        chosen = jnp.take_along_axis(patches, jnp.maximum(numbers, 0)[..., None], axis=2)
        seen = {"head": pooled, "patches": chosen, "real": jnp.asarray(numbers >= 0, jnp.float32)}
        return {**seen, "all": patches} if self._gram_weight and options["train"] else seen

    def loss_of(self, params: Any, embeddings: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """That of `Dino`, and the weighted `patch_loss` and `gram_loss`."""
        loss, metrics = super().loss_of(params, embeddings, batch)
        real = embeddings[TEACHER]["real"]  # [B, 2, M]
        student, teacher = (
            self._answers(params, who, self._patch_head, embeddings[who]["patches"])
            for who in (STUDENT, TEACHER)
        )  # [B, 2, M, K]
        targets = self._targets(params, "patch_center", teacher, real)
        losses = -jnp.sum(targets * student, axis=-1) * real
        losses = jnp.sum(losses, axis=-1) / jnp.maximum(jnp.sum(real, axis=-1), 1.0)  # [B, 2]
        patch_loss = masked_mean(jnp.mean(losses, axis=1), batch["mask"])
        total = jnp.maximum(jnp.sum(real), 1.0)
        center = jnp.einsum("bim,bimk->k", real, teacher) / total
        metrics["buffers"]["patch_center"] = jax.lax.stop_gradient(center)
        metrics["patch_loss"] = jax.lax.stop_gradient(patch_loss)
        loss += self._patch_weight * patch_loss
        if self._gram_weight:
            losses = gram_loss(embeddings[STUDENT]["all"], embeddings[GRAM])  # [B, 2]
            of_grams = masked_mean(jnp.mean(losses, axis=1), batch["mask"])
            metrics["gram_loss"] = jax.lax.stop_gradient(of_grams)
            loss += self._gram_weight * of_grams
        return loss, metrics


def gram_loss(student: jax.Array, anchor: jax.Array) -> jax.Array:
    """Mean square of the differences between all cosines of patches: [..., P, D] twice -> [...].

    Of the patches of one image (DINOv3, 2508.10104, equation 2).
    """
    ours, theirs = (jnp.einsum("...pd,...qd->...pq", x, x) for x in map(unit, (student, anchor)))
    return jnp.mean(jnp.square(ours - theirs), axis=(-2, -1))
