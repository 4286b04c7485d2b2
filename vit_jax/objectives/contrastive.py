"""Contrastive training of an image tower and a text tower: LiT (2111.07991).

Either with the softmax loss of CLIP (2103.00020) or the sigmoid loss of SigLIP (2303.15343).

Both towers return unit vectors, and an image's text is discriminated from all others of the global
batch. LiT freezes a pre-trained image tower and trains a text tower to match it.
"""

import dataclasses
import math
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.objectives.objective import Batch, Metrics, Objective, Task, images_of, masked_mean
from vit_jax.objectives.ring import sigmoid_losses

IMAGE, TEXT = "img", "txt"  # prefixes of the towers' parameters, as in big_vision


class Contrastive(Objective):
    """The mean of two softmax losses: finding the text of an image, and the image of a text.

    A batch holds `image` [B, H, W, C] and `text` [B, T]. The model is the text tower; the parameter
    `t` is the logarithm of the factor of the cosine similarities.
    """

    example_keys = ("image", "text")
    any_shape = True
    measures = ("loss", "accuracy")
    spans_batch = True
    prefix = TEXT
    own_parameters = MappingProxyType({"t": (None,)})

    def __init__(
        self, task: Task, *, image: str = "", lock_image: bool = True, temperature: float = 10.0
    ):
        """
        Args:
          task: its model is the text tower.
          image: weights of the image tower, see `pretrained.source`; or a variant, such as B/16,
            for random weights.
          lock_image: whether the image tower is frozen (LiT); else it is trained too.
          temperature: initial factor of the cosine similarities.

        Raises:
          UserError: no image tower, a locked one without weights, a model that takes no texts, or a
            temperature that is not positive.
        """
        super().__init__()
        if not image:
            raise UserError(
                "--config.objective.image is missing: set the image tower's weights, as in "
                "pretrained.source, or a variant such as B/16 to train it from scratch."
            )
        if not temperature > 0.0:
            raise UserError(f"objective.temperature={temperature} must be positive.")
        assert task.load_tower is not None
        self._image = tower = task.load_tower(image, "objective.image")
        self.num_outputs = tower.width
        self.model = task.build_model(tower.width)
        if not hasattr(self.model, "vocab_size"):
            raise UserError("a contrastive objective needs a text model; set model.name=text-B.")
        if tower.params is not None:
            (self.constants if lock_image else self.start)[IMAGE] = tower.params
        elif lock_image:
            raise UserError(
                f"objective.image={image!r} has random weights, which lock_image=True would "
                "freeze; give pre-trained weights, or set objective.lock_image=False."
            )
        self.eval_preprocess = task.eval_preprocess
        self._first = {"t": math.log(temperature)}

    @property
    def models(self) -> dict[str, Any]:
        return {IMAGE: self._image.module, TEXT: self.model}

    def describe(self, description: Any) -> dict[str, Any]:
        of_image = self._image.description
        if not of_image.eval_preprocess:  # a new model
            of_image = dataclasses.replace(of_image, eval_preprocess=self.eval_preprocess)
        return {IMAGE: of_image, TEXT: description}

    def init(self, rng: jax.Array, batch: Batch) -> Any:
        params = {name: jnp.full((1,), value) for name, value in self._first.items()}
        params[TEXT] = self.model.init(rng, batch["text"], train=False)["params"]
        if IMAGE not in self.constants:
            images, rng = images_of(batch), jax.random.fold_in(rng, 1)
            params[IMAGE] = self._image.module.init(rng, images, train=False)["params"]
        return params

    def embed(self, params: Any, batch: Batch, rng: Any = None) -> Any:
        """Unit vectors of images and texts, float32 [B, D] each; dropout if a key is given."""
        return {
            IMAGE: self.embed_images(params, batch, rng),
            TEXT: self.embed_texts(params, batch["text"], rng),
        }

    def embed_images(self, params: Any, batch: Batch, rng: Any = None) -> jax.Array:
        """Of the images of a batch: [B, D]."""
        images = self._image.to_input(images_of(batch))
        rng = None if IMAGE in self.constants else rng
        return _embed(self._image.module, params[IMAGE], images, rng)

    def embed_texts(self, params: Any, tokens: jax.Array, rng: Any = None) -> jax.Array:
        """[B, T] -> [B, D]."""
        return _embed(self.model, params[TEXT], tokens, rng)

    def loss_of(self, params: Any, embeddings: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """The mean over the examples of the batch; `accuracy` of image-to-text retrieval."""
        values = self._values(params, embeddings, batch["mask"])
        means = {name: masked_mean(value, batch["mask"]) for name, value in values.items()}
        return means.pop("loss"), {**means, "temperature": jnp.exp(params["t"][0])}

    def evaluate(self, params: Any, batch: Batch) -> Metrics:
        """As in training, within one batch, [B] each; the values depend on the batch size."""
        return self._values(params, self.embed(params, batch), batch["mask"])

    def _values(self, params: Any, embeddings: Any, mask: jax.Array) -> Metrics:
        """Per example, [B] each; padding is excluded."""
        logits = jnp.exp(params["t"][0]) * (embeddings[IMAGE] @ embeddings[TEXT].T)  # [B, B]
        hidden = jnp.where(mask > 0, 0.0, -jnp.inf)
        best = jnp.argmax(logits + hidden[None], axis=1)
        of_images = jax.nn.logsumexp(logits + hidden[None], axis=1)
        of_texts = jax.nn.logsumexp(logits + hidden[:, None], axis=0)
        return {
            "loss": (of_images + of_texts) / 2.0 - jnp.diagonal(logits),
            "accuracy": jnp.asarray(best == jnp.arange(len(mask)), jnp.float32),
        }


class SigmoidContrastive(Contrastive):
    """The binary cross-entropy of all pairs, summed over texts: -log sigmoid(z (t cos + b)).

    z is 1 for an image's own text and -1 for the others. Besides `t` there is a learned bias `b`.
    """

    own_parameters = MappingProxyType({"t": (None,), "b": (None,)})

    def __init__(self, task: Task, *, bias: float = -10.0, **kwargs: Any):
        """
        Args:
          bias: initial bias of the logits.
          **kwargs: of `Contrastive`.
        """
        super().__init__(task, **kwargs)
        self._first["b"] = bias

    def _values(self, params: Any, embeddings: Any, mask: jax.Array) -> Metrics:
        scale, bias = jnp.exp(params["t"][0]), params["b"][0]
        losses, hits = sigmoid_losses(scale, bias, embeddings[IMAGE], embeddings[TEXT], mask)
        return {"loss": losses, "accuracy": hits}


def _embed(model: Any, params: Any, inputs: jax.Array, rng: Any) -> jax.Array:
    """Unit vectors, float32 [B, D]; without `rng`, in evaluation mode."""
    rngs = {} if rng is None else {"dropout": rng}
    x = model.apply({"params": params}, inputs, train=rng is not None, rngs=rngs)
    x = jnp.asarray(x, jnp.float32)
    return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-8)
