"""The interface of objectives, and what they share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.patches import Patches
from vit_jax.trees import merge_trees

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Task:
    """What an objective is built from."""

    build_model: Callable[[int], Any]  # of a number of outputs
    image_shape: tuple[int, int, int] = (0, 0, 0)  # [H, W, C]
    class_names: tuple[str, ...] = ()  # of the data, in the order of the labels
    load_teacher: Callable[[str], Any] | None = None  # from a source; see `inference.load.Teacher`
    # From a source or the name of a variant, and the config key that has it.
    load_tower: Callable[[str, str], Any] | None = None
    eval_preprocess: str = ""  # ops of the evaluation; some may read texts
    read_labels: Callable[[], np.ndarray] | None = None  # all training labels, [N, ...]
    # Names and values [N, K] of all numbers to predict.
    read_targets: Callable[[], tuple[tuple[str, ...], np.ndarray]] | None = None
    tokens_of: Callable[..., Any] | None = None  # of a model; see `views.tokens_function`
    total_steps: int = 0  # updates of the run

    @classmethod
    def of(cls, model: Any) -> Self:
        """For an existing model."""
        return cls(build_model=lambda _: model)


class Objective:
    """The training loss, and the metrics of an example.

    A subclass is built as `Kind(task, *, key=default, ...)`: its keyword-only parameters, and those
    of its bases, are the keys of `config.objective`. It sets `model` and `num_outputs`, and defines
    `loss`, and `values` or `evaluate`, all pure. A batch holds the keys of `example_keys`, [B, ...]
    each, and `mask` [B] float32, 1 for real examples.

    The `params` that it is called with hold everything it reads, by name: what is trained;
    *constants*, which never change (a teacher, a locked tower) and are in no optimizer and no
    checkpoint; and *buffers*, which an update changes and no gradient does (an averaged teacher, a
    centre, the statistics of batch norms) and which are saved and resumed. The loop shards all of
    them alike.
    """

    model: Any  # linen module with `num_outputs` outputs
    num_outputs: int
    class_names: tuple[str, ...] = ()  # of the outputs; () if they are not the data's classes
    example_keys: tuple[str, ...] = ("image", "label")  # required keys of an example
    measures: tuple[str, ...] = ("loss",)  # names of the metrics that `evaluate` returns
    several_labels: bool = False  # `label` is [B, K] of 0 and 1, not [B]
    predicts_pixels: bool = False  # which then have to be in [-1, 1]
    spans_batch: bool = False  # the loss of a batch is not the mean of the losses of its parts
    probabilities_by: str = "softmax"  # how logits become probabilities; or "sigmoid"
    # Of outputs that are numbers: `names`, `mean`, `std`, `log`; see `models.description.Values`.
    numbers: dict[str, Any] | None = None
    constants: dict[str, Any]  # {name: tree}
    prefix: str = ""  # of the parameters of `model`, if there are others
    # Logical axes by name of parameters and buffers that belong to no model: a temperature.
    own_parameters: Mapping[str, tuple[str | None, ...]] = {}
    start: dict[str, Any]  # {name: tree of host arrays} of parameters with initial values
    any_patch_size: bool = False  # whether `task.at_patch_size` is for it
    any_shape: bool = False  # whether it is for images in shapes of their own
    fit: Callable[[Any], Any] | None = None  # parameters to those of `model`, if they differ
    values: Callable[..., Metrics]  # `measures` from the outputs of `model`, and a batch

    def __init__(self) -> None:
        self.constants, self.start = {}, {}

    @classmethod
    def check_accumulation(cls, name: str, steps: int) -> None:
        """Raises UserError for a loss over the batch that cannot be split into `steps` parts."""
        if steps > 1 and cls.spans_batch and cls.embed is Objective.embed:
            raise UserError(
                f"train_step.accumulation_steps={steps} must be 1: objective.name={name!r} "
                "compares the examples of a batch and does not define `embed`."
            )

    @classmethod
    def check_labels(cls, name: str, dataset: Any) -> None:
        """Raises UserError if the labels per image, one or several, do not fit the objective."""
        needs_label = "label" in cls.example_keys
        if not needs_label or bool(dataset.element_spec["label"].shape) == cls.several_labels:
            return
        has, hint = "one label", "a table with the column 'labels'"
        if not cls.several_labels:
            has, hint = "several labels", "objective.name='multi_label'"
        raise UserError(
            f"dataset.name={dataset.name!r} has {has} per image; objective.name={name!r} is for "
            f"{'several' if cls.several_labels else 'one'}; use {hint}."
        )

    @property
    def models(self) -> dict[str, Any]:
        """All models by prefix; evaluators of features use the first one that takes images."""
        return {self.prefix: self.model}

    def describe(self, description: Any) -> dict[str, Any]:
        """Descriptions of the resulting models by prefix; the first is loaded by default."""
        return {self.prefix: description}

    def init(self, rng: jax.Array, batch: Batch) -> Any:
        """Random parameters for batches of these shapes."""
        images = images_of(batch)
        return self.below_prefix(self.model.init(rng, images, train=False)["params"])

    def start_buffers(self, params: Any) -> dict[str, Any]:
        """Buffers of the objective itself before the first update of `params`, by name; pure."""
        del params
        return {}

    def update(self, buffers: Any, params: Any, seen: Any) -> Any:
        """The buffers after an update that has led to `params`; pure.

        Args:
          buffers: those before, with the statistics of the models' batch norms.
          params: what is trained.
          seen: the entry `buffers` among the metrics of `loss`, a tree of arrays, averaged over the
            parts of a batch; {} without one. This default takes it as new values.
        """
        del params
        return merge_trees(buffers, seen)

    def apply(self, params: Any, images: jax.Array) -> jax.Array:
        """Outputs of `model` in evaluation, for scaled images [B, H, W, C]."""
        return self.model.apply({"params": self._own(params)}, images, train=False)

    def apply_train(self, params: Any, images: jax.Array, rng: jax.Array) -> tuple[Any, Any, Any]:
        """In training: outputs, what the model has sown by name, {`buffers` of the metrics}."""
        outputs, stored = self.model.apply(
            {"params": self._own(params)},
            images,
            train=True,
            rngs={"dropout": rng},
            mutable=["outputs", "buffers"],
        )
        sown = {name: values[0] for name, values in stored.get("outputs", {}).items()}
        statistics = stored.get("buffers")
        return outputs, sown, {"buffers": self.below_prefix(statistics)} if statistics else {}

    def _own(self, params: Any) -> Any:
        own = params[self.prefix] if self.prefix else params
        return own if self.fit is None else self.fit(own)

    def below_prefix(self, tree: Any) -> Any:
        """A tree of `model` as a part of the run's."""
        return {self.prefix: tree} if self.prefix else tree

    def prepare(self, batch: Batch) -> Batch:
        """Adds to a mixed batch, before accumulation splits it, what a loss needs of the others."""
        return batch

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        """The scalar to minimise on a training batch, and scalars to log.

        The entry `buffers` of these is not logged but handed to `update`. With `spans_batch`, as
        in a contrastive loss, `embed` and `loss_of` define it.
        """
        return self.loss_of(params, self.embed(params, batch, rng), batch)

    def embed(self, params: Any, batch: Batch, rng: jax.Array) -> Any:
        """The input of `loss_of` for every example: any tree of float arrays [B, ...]."""
        raise NotImplementedError

    def loss_of(self, params: Any, embeddings: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """`loss` from the embeddings of the whole batch; `params` may hold a temperature."""
        raise NotImplementedError

    def predict(self, params: Any, batch: Batch) -> jax.Array:
        """Outputs of `model` in evaluation, for the images of a batch."""
        return self.apply(params, images_of(batch))

    def evaluate(self, params: Any, batch: Batch) -> Metrics:
        """`measures` of every example, [B] float32 each; deterministic; here `values`."""
        return self.values(self.predict(params, batch), batch)

    def watch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a warning if a row of the log shows that training has gone wrong."""


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of [B] over real examples."""
    return jnp.sum(values * (mask / jnp.maximum(jnp.sum(mask), 1.0)))


def scale_images(images: jax.Array) -> jax.Array:
    """uint8 [B, H, W, C] -> float32 in [-1, 1], the range of the published models.

    Floats are returned unchanged: the preprocessing has scaled them (`value_range`).
    """
    if images.dtype == jnp.uint8:
        return jnp.asarray(images, jnp.float32) / 127.5 - 1.0
    return images


def images_of(batch: Batch, key: str = "image") -> Any:
    """The scaled images of a batch, [B, H, W, C], or `Patches` of images in their own shapes."""
    images = scale_images(batch[key])
    return Patches(images, batch["grid"]) if key == "image" and "grid" in batch else images


def of_batches(
    function: Callable[[Any, jax.Array], Any], key: str = "image", prefix: str = ""
) -> Callable[[Any, Batch], Any]:
    """Turns a function of (params, model input) into one of (params, batch)."""
    return lambda params, batch: function(
        params[prefix] if prefix else params, images_of(batch, key)
    )
