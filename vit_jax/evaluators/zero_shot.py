"""Zero-shot classification (2103.00020, section 3.1): the class whose name matches best."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.preprocess import encode_texts
from vit_jax.data.text import read_prompts
from vit_jax.errors import UserError
from vit_jax.evaluators.stream import Hook, Reader, compile_outputs, nothing
from vit_jax.parameters.sharding import replicated


class ZeroShotEvaluator:
    """Accuracy of two towers on a labelled data set that they were not trained to classify.

    A class is the mean embedding of its name in all prompts.
    """

    example_keys = ("image", "label")
    metric_names = ("accuracy", "num_examples")

    def __init__(
        self, objective: Any, reader: Reader, *, prompts: tuple[str, ...] = ("a photo of a {}.",)
    ):
        """Raises UserError without text tower or class names, or for a prompt without {}.

        Args:
          objective: has `embed_images`, `embed_texts` and `eval_preprocess`.
          reader: of images and labels; preprocessing need not read texts.
          prompts: see `fill_prompts`.
        """
        names = reader.dataset.class_names  # type: ignore[attr-defined]
        if not hasattr(objective, "embed_texts"):
            raise UserError("evaluators.*.name='zero_shot' needs objective.name='contrastive'.")
        self._reader = reader
        texts = fill_prompts(prompts, names, "evaluators.*.prompts")
        self._tokens = encode_texts(objective.eval_preprocess, texts)  # [K * P, T]

        def classes(params: Any, tokens: jax.Array) -> jax.Array:
            return class_vectors(objective.embed_texts(params, tokens), len(names))

        def outputs(params: Any, batch: Any) -> dict[str, jax.Array]:
            images = objective.embed_images(params["towers"], batch)  # [B, D]
            best = jnp.argmax(images @ params["classes"].T, axis=-1)
            return {"hit": jnp.asarray(best == batch["label"], jnp.float32)}

        self._classes = jax.jit(classes, out_shardings=replicated(reader.mesh))
        self._step = compile_outputs(outputs, reader.mesh)

    def __call__(self, params: Any, *, on_batch: Hook = nothing) -> dict[str, float]:
        """See `ObjectiveEvaluator`."""
        arguments = {"towers": params, "classes": self._classes(params, self._tokens)}
        hits = self._reader.outputs(self._step, arguments, on_batch)["hit"]
        return {"accuracy": float(np.mean(hits, dtype=np.float64)), "num_examples": len(hits)}


class TextHead(NamedTuple):
    """Makes logits of classes of the embeddings of an image tower: scale * cosine + bias."""

    tower: Any  # a linen module: images -> embeddings [B, D]
    classes: np.ndarray  # unit vectors, float32 [K, D]
    scale: float = 1.0
    bias: float = 0.0

    def logits(self, embeddings: Any) -> jax.Array:
        """[B, D], of any length -> float32 [B, K]."""
        units = embeddings / jnp.linalg.norm(embeddings, axis=-1, keepdims=True)
        # Accelerators' fast products round by 1e-3, which a scale of 100 makes 0.1.
        cosines = jnp.matmul(units, self.classes.T, precision="highest")
        return self.scale * cosines + self.bias

    def apply(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Logits, where an objective calls its model's `apply`."""
        return self.logits(self.tower.apply(*args, **kwargs))


def fill_prompts(prompts: Sequence[str], names: Sequence[str], key: str = "prompts") -> list[str]:
    """The texts of all classes, K * P of them; UserError without any, or as `read_prompts`."""
    prompts = read_prompts(prompts)
    if not len(names) or not len(prompts) or not all("{}" in prompt for prompt in prompts):
        text = f"{key}={prompts!r} must contain {{}} in place of the class name, and there must be"
        raise UserError(f"{text} class names (there are {len(names)}).")
    return [prompt.format(name) for name in names for prompt in prompts]


def class_vectors(embeddings: Any, num_classes: int) -> jax.Array:
    """Embeddings of `fill_prompts`, [K * P, D] of any length, to unit vectors [K, D]."""
    x = embeddings / jnp.linalg.norm(embeddings, axis=-1, keepdims=True)
    x = jnp.mean(jnp.reshape(x, (num_classes, -1, x.shape[-1])), axis=1)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
