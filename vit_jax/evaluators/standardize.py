"""Standardised features for a linear head: the batch norm without parameters of linear probes.

Channel by channel, the head's input is z = n * scale + bias with n from the last layer norm (its
mean over tokens, if they are averaged). With the mean m and the deviation s of z over a data set,
(z - m) / s is the same for scale / s and (bias - m) / s: values of parameters, not another model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vit_jax.errors import counted
from vit_jax.evaluators.stream import Reader, compile_outputs, stream_outputs
from vit_jax.parameters.names import flatten_names, last_norm, unflatten_names
from vit_jax.parameters.sharding import parameter_shardings

EPSILON = 1e-6  # added to the variance, as in MAE's linear probe


def standardize(loaded: Any, feature_of: Callable[[Any, Any], jax.Array], reader: Reader) -> Any:
    """Parameters whose features have mean 0 and deviation 1 on the images of `reader`.

    Args:
      loaded: parameters on the host, with shapes in place of a new head's arrays.
      feature_of: (parameters, batch) -> the head's input, [B, D].
      reader: of a data set, whose images go through its ops once, random ones included.
    """

    def place(x: Any, sharding: Any) -> jax.Array:
        array = np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    params = jax.tree.map(place, loaded, parameter_shardings(loaded, reader.mesh))
    logging.info("Standardising the features on %s.", counted(reader.dataset.num_examples, "image"))
    step = compile_outputs(lambda p, batch: {"feature": feature_of(p, batch)}, reader.mesh)
    count, total, squares = 0, np.zeros(()), np.zeros(())
    for part in stream_outputs(step, params, reader):
        x = np.asarray(part["feature"], np.float64)
        count, total, squares = count + len(x), total + x.sum(0), squares + (x * x).sum(0)
    mean = total / count
    std = np.sqrt(squares / count - mean**2 + EPSILON)
    flat, norm = flatten_names(loaded), last_norm(loaded)
    scale, bias = (np.asarray(flat[f"{norm}/{name}"]) for name in ("scale", "bias"))
    new = {f"{norm}/scale": scale / std, f"{norm}/bias": (bias - mean) / std}
    return unflatten_names({**flat, **{name: np.float32(x) for name, x in new.items()}})
