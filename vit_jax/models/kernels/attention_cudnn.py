"""cuDNN's fused attention, for GPUs."""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import jax

from vit_jax.errors import UserError, one_line
from vit_jax.models.kernels.attention import xla

_LIBRARY = "jax._src.cudnn.fused_attention_stablehlo"


@functools.cache
def _library() -> Any:
    """JAX's module with the check that `_with_gradient` corrects; None, with a line, without it."""
    try:
        library = importlib.import_module(_LIBRARY)
        inspect.signature(library.check_is_flash_attention)
    except (ImportError, AttributeError):
        logging.warning("This JAX has no %s: attention is 'xla', not 'cudnn'.", _LIBRARY)
        return None
    return library


def cudnn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: jax.Array | None = None,
    implementation: Any = "cudnn",
) -> jax.Array:
    """Scores never leave the chip. Heads of 8, 16, ... features."""
    if _library() is None:
        return xla(query, key, value, lengths=lengths)
    attention = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    try:
        return _of_any_length(attention, query, key, value, lengths)
    except RuntimeError as error:  # of JAX, while tracing: heads too large, no cuDNN
        raise UserError(
            f"model.attention='cudnn': {one_line(error)} Use model.attention=xla."
        ) from error


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_any_length(
    attention: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *real: Any,
) -> jax.Array:
    return _attend(attention, *real)(query, key, value)


def _attend(attention: Callable[..., jax.Array], lengths: Any) -> Callable[..., jax.Array]:
    """Of queries, keys and values. With lengths cuDNN's outputs of padding are zero."""
    return functools.partial(attention, query_seq_lengths=lengths, key_value_seq_lengths=lengths)


def _with_gradient(attention: Callable[..., jax.Array], *arguments: Any) -> Any:
    """JAX (0.10 to 0.12) mistakes its own placeholder for a bias, whose tokens must be even."""
    library = _library()
    check = library.check_is_flash_attention

    def without_bias(*arguments: Any, **options: Any) -> None:
        bound = inspect.signature(check).bind(*arguments, **options)
        check(**{**bound.arguments, "has_bias": False})

    library.check_is_flash_attention = without_bias
    try:
        *qkv, lengths = arguments
        return jax.vjp(_attend(attention, lengths), *qkv)
    finally:
        library.check_is_flash_attention = check


_of_any_length.defvjp(_with_gradient, lambda _, gradient, d_out: (*gradient(d_out), None))
