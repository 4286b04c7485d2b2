"""Models and objectives that the package does not know, written as contributors would.

The parameters of the two families have the same names, but other shapes and axes.
"""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from vit_jax.models import create
from vit_jax.models.family import (
    FIRST,
    HEAD,
    Family,
    ModelBase,
    Row,
    Shapes,
    axis_of,
    count_blocks,
    patch_size_of,
)
from vit_jax.models.layers import IdentityLayer, apply_blocks, embed_patches, loop_of
from vit_jax.objectives import create as objectives
from vit_jax.objectives.objective import Batch, Metrics, Objective, Task, masked_mean, scale_images
from vit_jax.objectives.patches import split_patches


class AverageBlock(nn.Module):
    """Each token plus a map of the mean of all: [B, N, D] -> [B, N, D]."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None, *, train: bool) -> jax.Array:
        del train
        return x + nn.tanh(nn.Dense(x.shape[-1], name="mix")(jnp.mean(x, axis=1, keepdims=True)))


class Patches(ModelBase):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32.

    Attributes:
      num_classes: number of logits; 0 returns the representation.
      patch_size: side of a patch in pixels.
      hidden_size, num_layers: width of the tokens, number of blocks.
      scan: compile the blocks as one loop.
      dtype: of the computation.
    """

    num_classes: int
    patch_size: int
    hidden_size: int
    num_layers: int
    scan: bool = False
    dtype: Any = jnp.float32

    kind = "toy_patches"

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        x = self._embed(jnp.asarray(images, self.dtype))
        x = apply_blocks(
            AverageBlock,
            jnp.reshape(x, (x.shape[0], -1, self.hidden_size)),  # [B, N, D]
            name="block",
            train=train,
            **loop_of(self),
        )
        x = IdentityLayer(name="tokens")(x)
        x = IdentityLayer(name="pre_logits")(jnp.mean(x, axis=1, dtype=jnp.float32))
        return nn.Dense(self.num_classes, name="head")(x) if self.num_classes else x

    def _embed(self, images: jax.Array) -> jax.Array:
        return embed_patches(self, images)


class Pixels(Patches):
    """As `Patches`, with a dense layer on the pixels of each patch."""

    kind = "toy_pixels"

    def _embed(self, images: jax.Array) -> jax.Array:
        pixels = split_patches(images, self.pixels_per_token)  # [B, N, h, w, C]
        pixels = jnp.reshape(pixels, (*pixels.shape[:2], -1))
        return nn.Dense(self.hidden_size, name="embedding")(pixels)


_BLOCK = r"block(?:_(?P<block>\d+))?"


def infer(shapes: Shapes) -> dict[str, Any]:
    return {
        "patch_size": patch_size_of(shapes, "embedding/kernel"),
        "hidden_size": axis_of(shapes, "embedding/bias", 1, 0),
        "num_layers": count_blocks(shapes, "block"),
    }


PATCHES = Family(
    module=Patches,
    title="toy of patches",
    acronym="Patches",
    rows=(
        Row("embedding/kernel", (None, None, None, "embed"), FIRST, role="patches"),
        Row("embedding/bias", ("embed",), FIRST),
        Row(f"{_BLOCK}/mix/kernel", ("embed", "mlp")),
        Row(f"{_BLOCK}/mix/bias", ("mlp",)),
        *HEAD,
    ),
    infer=infer,
    blocks="block",
    tokens="tokens",
)
PIXELS = Family(
    module=Pixels,
    title="toy of pixels",
    acronym="Pixels",
    rows=(
        Row("embedding/kernel", ("mlp", "embed"), FIRST),
        Row("embedding/bias", (None,), FIRST),
        Row(f"{_BLOCK}/mix/kernel", (None, "heads")),
        Row(f"{_BLOCK}/mix/bias", ("heads",)),
        *HEAD,
    ),
    infer=infer,
    blocks="block",
    tokens="tokens",
)
SIZES = {"patch_size": 8, "hidden_size": 16, "num_layers": 2}


class Prototypes(Objective):
    """Cosine similarity to a learned vector of each class, which belongs to no model."""

    own_parameters = MappingProxyType({"prototypes": ("classes", "embed")})
    measures = ("loss", "accuracy")
    probabilities_by = "none"

    def __init__(self, task: Task, *, width: int = 8):
        """
        Args:
          task: its model gives embeddings.
          width: of them.
        """
        super().__init__()
        self.num_outputs, self._count = width, len(task.class_names)
        self.model = task.build_model(width)

    def init(self, rng: jax.Array, batch: Batch) -> Any:
        prototypes = jax.random.normal(rng, (self._count, self.num_outputs))
        return {**super().init(rng, batch), "prototypes": prototypes}

    def _values(self, params: Any, embeddings: jax.Array, labels: jax.Array) -> Metrics:
        squares = [jnp.sum(jnp.square(x), axis=-1, keepdims=True) for x in (embeddings, params)]
        scales = [jax.lax.rsqrt(square + 1e-6) for square in squares]  # of zeros, too
        logits = 10.0 * (embeddings * scales[0]) @ (params * scales[1]).T
        hits = jnp.asarray(jnp.argmax(logits, axis=-1) == labels, jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return {"loss": losses, "accuracy": hits}

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        embeddings, _, seen = self.apply_train(params, scale_images(batch["image"]), rng)
        values = self._values(params["prototypes"], embeddings, batch["label"])
        means = {name: masked_mean(value, batch["mask"]) for name, value in values.items()}
        return means.pop("loss"), {**means, **seen}

    def evaluate(self, params: Any, batch: Batch) -> Metrics:
        embeddings = self.apply(params, scale_images(batch["image"]))
        return self._values(params["prototypes"], embeddings, batch["label"])


class SelfDistillation(Objective):
    """Agreement with a teacher, the moving average of the student, on flipped images (DINO's core).

    The teacher and the centre of its outputs are buffers.
    """

    example_keys = ("image",)
    prefix = "student"
    own_parameters = MappingProxyType({"centre": (None,)})
    probabilities_by = "none"

    def __init__(self, task: Task, *, momentum: float = 0.9, outputs: int = 8):
        """
        Args:
          task: its model is the student, and the teacher.
          momentum: of teacher and centre.
          outputs: of both models.
        """
        super().__init__()
        self.num_outputs, self._momentum = outputs, momentum
        self.model = task.build_model(outputs)

    @property
    def models(self) -> dict[str, Any]:
        return {"student": self.model, "teacher": self.model}

    def describe(self, description: Any) -> dict[str, Any]:
        return {"teacher": description, "student": description}

    def start_buffers(self, params: Any) -> dict[str, Any]:
        return {"teacher": params["student"], "centre": jnp.zeros(self.num_outputs)}

    def update(self, buffers: Any, params: Any, seen: Any) -> Any:
        now = {"teacher": params["student"], "centre": seen["outputs"]}
        return jax.tree.map(
            lambda old, new: self._momentum * old + (1.0 - self._momentum) * new, buffers, now
        )

    def _losses(self, params: Any, images: jax.Array, student: jax.Array) -> tuple[Any, Any]:
        teacher = self.model.apply({"params": params["teacher"]}, images[:, :, ::-1], train=False)
        targets = jax.nn.softmax((teacher - params["centre"][None]) / 0.1)
        losses = optax.softmax_cross_entropy(student, jax.lax.stop_gradient(targets))
        return losses, teacher

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        images = scale_images(batch["image"])
        student, _, _ = self.apply_train(params, images, rng)
        losses, teacher = self._losses(params, images, student)
        seen = {"outputs": jnp.mean(teacher, axis=0)}
        return masked_mean(losses, batch["mask"]), {"buffers": jax.lax.stop_gradient(seen)}

    def evaluate(self, params: Any, batch: Batch) -> Metrics:
        images = scale_images(batch["image"])
        losses, _ = self._losses(params, images, self.apply(params, images))
        return {"loss": losses}


def registered() -> Iterator[None]:
    """The toys in the tables, as their rows would be."""
    kinds = {"toy_patches": PATCHES, "toy_pixels": PIXELS}
    with pytest.MonkeyPatch.context() as patch:
        for kind, family in kinds.items():
            patch.setitem(create.MODELS, kind, family)
            patch.setitem(create.VARIANTS_OF, kind, {f"{kind}/8": SIZES})
            patch.setitem(create.VARIANTS, f"{kind}/8", {"name": kind, **SIZES})
        patch.setitem(objectives.OBJECTIVES, "prototypes", Prototypes)
        patch.setitem(objectives.OBJECTIVES, "self_distillation", SelfDistillation)
        yield
