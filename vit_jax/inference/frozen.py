"""A trained model as a part of an objective: a teacher, later a locked tower."""

from __future__ import annotations

from collections.abc import Sequence

from vit_jax.errors import UserError, as_user_error
from vit_jax.inference.class_order import match_classes
from vit_jax.inference.inputs import input_range
from vit_jax.inference.load import load_model
from vit_jax.objectives.objective import FrozenModel


def load_frozen(
    key: str, source: str, *, image_shape: tuple[int, ...], class_names: Sequence[str], dtype: str
) -> FrozenModel:
    """A model of any format for images of that shape and these classes, in the form of a loop.

    Args:
      key: of the config, for errors.
      source: see `load_model`.
      image_shape: [H, W, C]; position embeddings are interpolated.
      class_names: of the data, found among the model's in any order.
      dtype: of its computations.

    Raises:
      UserError: see `load_model`; also other channels, or not the classes of the data.
    """
    try:
        model = load_model(source, image_size=(image_shape[0], image_shape[1]), dtype=dtype)
        found = model.description
        if found.image_shape != image_shape:
            raise UserError(f"it takes images of {found.image_shape}, the data have {image_shape}.")
        outputs = match_classes(class_names, found.class_names, found.model["num_classes"])
    except UserError as error:
        raise as_user_error(f"{key}={source!r}: {error}", error) from error
    black, white = input_range(found)
    return FrozenModel(model.module, model.params, black, white, outputs)
