"""A loaded model as most people use it: images in, classes, features or attention out."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.decode import decode_image, pillow_pixels
from vit_jax.data.ops import Decode
from vit_jax.errors import UserError
from vit_jax.inference import load
from vit_jax.inference.features import check_features, feature_function
from vit_jax.inference.inputs import input_chain
from vit_jax.models.look import look
from vit_jax.objectives.classification import PROBABILITIES
from vit_jax.objectives.objective import scale_images

Image = Any  # see `Model`


@dataclasses.dataclass(frozen=True)
class Model(load.PretrainedModel):
    """A model and its parameters.

    An image is the path of a file, its bytes, a Pillow image, or uint8 pixels [H, W, C] or [H, W],
    of any size; images are one, a list of them, or uint8 [B, H, W, C]. Float arrays [B, H, W, C]
    are taken as what `preprocess` returned.
    """

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of the outputs; () if they are not known."""
        return self.description.class_names

    def preprocess(self, images: Image | Sequence[Image]) -> np.ndarray:
        """The model's input: float32 [B, H, W, C]; one image is a batch of one.

        Raises:
          UserError: an image cannot be read.
        """
        chain, _ = self._chain
        found = []
        for number, image in enumerate(images if _is_batch(images) else [images]):
            try:
                pixels = self._stored(image)
                example = chain({"image": pixels, "label": 0}, np.random.default_rng(0))
            except (ValueError, OSError) as error:
                name = image if isinstance(image, str | os.PathLike) else f"image {number}"
                raise UserError(f"{name}: {error}") from error
            found.append(example["image"])
        return np.asarray(scale_images(jnp.asarray(np.stack(found))), np.float32)

    def logits(self, images: Any, *, batch_size: int = 32) -> np.ndarray:
        """Float32 [B, K]."""
        return self.features(images, "logits", batch_size=batch_size)

    def predict(self, images: Any, *, top: int = 5) -> list[Any]:
        """The most probable classes: [(class, probability), ...], for a batch one such list each.

        Raises:
          UserError: the model has no head, or an image cannot be read.
        """
        num_outputs = self.description.model["num_classes"]
        if not num_outputs:
            raise UserError("the model has no head, so it names no class; see `features`.")
        to_probabilities = PROBABILITIES[self.description.probabilities_by or "softmax"]
        probabilities = np.asarray(to_probabilities(jnp.asarray(self.logits(images))))
        names = self.class_names or tuple(f"class {i}" for i in range(num_outputs))
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
        found = [
            [(names[k], float(row[k])) for k in order]
            for row, order in zip(probabilities, best, strict=True)
        ]
        return found if _is_batch(images) else found[0]

    def features(
        self, images: Any, name: str = "pre_logits", *, batch_size: int = 32
    ) -> np.ndarray:
        """A feature of `scripts/extract_features.py`, float32 [B, ...].

        Raises:
          UserError: the model does not have it, or an image cannot be read.
        """
        function = self._function(name)
        parts = [
            function(self.params, {"image": part}) for part in self._batches(images, batch_size)
        ]
        return np.concatenate([np.asarray(part[name]) for part in parts])

    def attention(self, images: Any, *, batch_size: int = 8) -> np.ndarray:
        """Attention weights of every block: float32 [L, B, heads, N, N].

        N: class and distillation token, if any, then the grid row by row.

        Raises:
          UserError: the model has none, or an image cannot be read.
        """
        return self.look(images, batch_size=batch_size)["attention"]

    def look(
        self, images: Any, what: str | Sequence[str] = "attention", *, batch_size: int = 8
    ) -> dict[str, np.ndarray]:
        """What happens inside every block: float32 arrays, those of `models/look.py`.

        Raises:
          UserError: an unknown name, a model without attention, or an image cannot be read.
        """
        names = (what,) if isinstance(what, str) else tuple(what)
        if names not in self._functions:
            self._functions[names] = jax.jit(functools.partial(look, self.module, what=names))
        parts = [
            {
                name: np.asarray(array, np.float32)
                for name, array in self._functions[names](self.params, part).items()
            }
            for part in self._batches(images, batch_size)
        ]
        return {name: np.concatenate([part[name] for part in parts], axis=1) for name in names}

    def __repr__(self) -> str:
        size, grid = self.description.image_shape, self.description.grid
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return (
            f"Model({self.source!r}, {count:,} parameters, images {size[0]}x{size[1]}x{size[2]}, "
            f"tokens {grid[0]}x{grid[1]}, {self.description.model['num_classes']} outputs)"
        )

    def _stored(self, image: Image) -> bytes | np.ndarray:
        """The image as the first op takes it."""
        if isinstance(image, str | os.PathLike):
            image = Path(image).read_bytes()
        decode = self._chain[0].ops[0]
        if hasattr(image, "convert"):
            image = pillow_pixels(image, exif=getattr(decode, "exif", True))
        stored: Any = image if isinstance(image, bytes) else np.asarray(image)
        if isinstance(decode, Decode):
            return stored
        return decode_image(stored, channels=self.description.image_shape[2], exif=True)

    @functools.cached_property
    def _chain(self) -> Any:
        return input_chain(self.description)

    @functools.cached_property
    def _functions(self) -> dict[Any, Any]:
        return {}  # compiled, by feature, or by what `look` is to show

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            check_features(self.module, [name], "name")
            self._functions[name] = jax.jit(feature_function(self.module, [name]))
        return self._functions[name]

    def _batches(self, images: Any, batch_size: int) -> Iterator[np.ndarray]:
        size = self.description.image_shape
        is_input = isinstance(images, np.ndarray | jax.Array) and np.issubdtype(
            images.dtype, np.floating
        )
        if is_input:
            images = np.asarray(images)
            if images.shape[1:] != size:
                raise UserError(
                    f"float images are the model's input, [B, {', '.join(map(str, size))}], not "
                    f"{list(images.shape)}; `preprocess` takes uint8 pixels of any size."
                )
        elif not _is_batch(images):
            images = [images]
        if not len(images):
            raise UserError("there are no images.")
        for start in range(0, len(images), batch_size):
            part = images[start : start + batch_size]
            yield part if is_input else self.preprocess(part)


def _is_batch(images: Any) -> bool:
    return isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4


def load_model(source: str | os.PathLike[str], **options: Any) -> Model:
    """Loads weights of any format together with the model that they are for.

    Args:
      source: a work directory, a file or folder of weights, gs://, https://, hf://owner/name, or a
        name of `list_models`.
      options: of `vit_jax.inference.load.load_model`, such as `image_size=384`.

    Raises:
      UserError: there is nothing there, or nothing that can be read.
    """
    loaded = load.load_model(source, **options)
    return Model(
        **{field.name: getattr(loaded, field.name) for field in dataclasses.fields(loaded)}
    )
