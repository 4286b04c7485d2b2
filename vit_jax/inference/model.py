"""A ready-to-use model: images in; classes, features or attention out."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.console import watched
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.pipeline import Examples
from vit_jax.data.preprocess import encode_texts, parse
from vit_jax.errors import UserError, methods_with_short_errors, naming
from vit_jax.evaluators.create import EvaluatorKeys
from vit_jax.evaluators.stream import Reader, compile_outputs, stream_outputs
from vit_jax.evaluators.zero_shot import TextHead, class_vectors, fill_prompts
from vit_jax.files.paths import read_json, reading
from vit_jax.inference.images import Images, Inputs, input_chain, input_range
from vit_jax.kinds import check_known
from vit_jax.models.create import MODELS, clone_with, family_of, variant_of
from vit_jax.models.description import Description
from vit_jax.models.features import check_features, feature_function
from vit_jax.models.look import look
from vit_jax.objectives.classification import PROBABILITIES
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.objectives.objective import images_of, of_batches
from vit_jax.parameters.sharding import BATCH_AXES, create_mesh, replicated
from vit_jax.parameters.table import abstract_params
from vit_jax.patches import Patches
from vit_jax.trees import flatten_names, unflatten_names
from vit_jax.wording import list_names

# What an example has besides its image, by the names of `Model.stream`.
ALONG = {"labels": "label", "grid": "grid"}


@methods_with_short_errors
@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its parameters; created by `inference.load.load_model`.

    An image is the path of a file, its bytes, a Pillow image, or uint8 pixels [H, W, C] or [H, W],
    of any size; images are one, a list of them, or uint8 [B, H, W, C]. Float arrays [B, H, W, C]
    are taken as outputs of `preprocess`. `module.apply({"params": params}, images, train=False)`
    takes such floats and returns logits [B, K] float32 (after `with_classes` embeddings, of which
    `text_head` makes the logits). A text model takes strings instead of images, and `preprocess`
    returns their tokens, int32 [B, T].
    """

    module: Any  # a linen module
    params: Any  # nested dict of numpy float32 arrays, loop form of the blocks
    description: Description  # sizes, classes, and how an image file becomes an input
    format: str  # of the weights
    source: str  # of the weights
    report: dict[str, Any]  # what happened to every array, see `fit.adapt.adapt_params`
    text_head: TextHead | None = None  # of `with_classes`
    load_texts: Callable[[], Model] | None = None  # the tower of texts of the same source
    _steps: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, compare=False)

    @property
    def is_text(self) -> bool:
        """Whether it takes texts instead of images."""
        return family_of(self.module).input == "text"

    def sample(self, count: int, seed: int = 0) -> np.ndarray:
        """Random input, to compare the outputs of two programs."""
        rng, shape = np.random.default_rng(seed), (count, *self.description.image_shape)
        if self.is_text:
            return rng.integers(0, self.module.vocab_size, shape).astype(np.int32)
        return rng.uniform(-1, 1, shape).astype(np.float32)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the outputs; () if unknown."""
        return self.description.class_names

    @property
    def num_outputs(self) -> int:
        """K of `logits`; 0 without a head."""
        head = self.text_head
        return len(head.classes) if head else self.description.model["num_classes"]

    def check_head(self) -> None:
        """Raises UserError for a model that predicts nothing."""
        if not self.num_outputs:
            raise UserError(
                f"{self.source}: the model has no head, so it predicts no classes; use its "
                "features: scripts/probe.py, scripts/extract_features.py."
            )

    def preprocess(self, images: Any) -> Any:
        """The model's input: float32 [B, H, W, C]; one image is a batch of one.

        For a text model its tokens, int32 [B, T]; for images in shapes of their own `Patches`.
        UserError if an image cannot be read.
        """
        if self.is_text:
            texts = [images] if isinstance(images, str) else list(images)
            if not self.description.eval_preprocess:
                raise UserError(
                    f"{self.source}: no tokenizer beside the weights; put its tokenizer.json there,"
                    " or load with preprocess=\"tokenize('caption', VOCAB, LENGTH)\"."
                )
            return encode_texts(self.description.eval_preprocess, texts)
        examples = Images(images if _is_batch(images) else [images], self.description)
        rng = np.random.default_rng(0)
        rows = [examples.example(i, rng) for i in range(examples.num_examples)]
        _raise_first_failure(examples)
        batch = {key: jnp.stack([row[key] for row in rows]) for key in examples.element_spec}
        return jax.tree.map(np.asarray, images_of(batch))

    def logits(self, images: Any, *, batch_size: int = 32) -> np.ndarray:
        """Float32 [B, K]."""
        return self.features(images, "logits", batch_size=batch_size)

    def predict(self, images: Any, *, top: int = 5) -> list[Any]:
        """The most probable classes: [(class, probability), ...], for a batch one list per image.

        UserError if the model has no head, or an image cannot be read.
        """
        examples = self._examples(images)
        answers = watched(self.answers(examples, top=top), "image", examples.num_examples)
        predictions = [[(row["class"], row["probability"]) for row in answer] for answer in answers]
        _raise_first_failure(examples)
        return predictions if _is_batch(images) else predictions[0]

    def answers(
        self, examples: Examples, *, top: int = 5, loss: str = "", batch_size: int = 32
    ) -> Iterator[list[dict[str, Any]]]:
        """The most probable classes of each example: `class`, `output` (its number), `probability`.

        Args:
          examples, batch_size: see `stream`.
          top: how many classes, at most as many as there are.
          loss: `softmax`, where the probabilities of all classes add up to 1, or `sigmoid`, one
            probability for each; "" for the one that the model was trained with, if known.

        UserError if the model has no head, or an argument is invalid.
        """
        num_outputs = self.num_outputs
        if self.module.outputs_per == "pixel":
            raise UserError("the model predicts pixels: scripts/predict.py --output, or `logits`.")
        if type(top) is not int or top < 1:
            raise UserError(f"--top={top!r} must be an integer, at least 1.")
        self.check_head()
        if loss:
            check_known("--loss", loss, PROBABILITIES)
        by = loss or self.description.probabilities_by or "softmax"
        if by == "none" or (num_outputs == 1 and by == "softmax"):
            none = "cosines of unknown temperature" if self.text_head else "regression targets"
            kind = none if by == "none" else "a single logit, whose softmax is 1"
            raise UserError(f"the model's outputs are {kind}; use its logits (features) instead.")
        names = self.class_names or [f"class {i}" for i in range(num_outputs)]
        for part in self.stream(["logits"], examples, batch_size):
            for row in np.asarray(PROBABILITIES[by](jnp.asarray(part["logits"]))):
                best = np.argsort(-row, kind="stable")[:top].tolist()
                yield [{"class": names[k], "output": k, "probability": float(row[k])} for k in best]

    def features(
        self, images: Any, name: str = "pre_logits", *, batch_size: int = 32
    ) -> np.ndarray:
        """A feature of `models/features.py`, float32 [B, ...].

        UserError if the model does not have it, or an image cannot be read.
        """
        examples = self._examples(images)
        stream = watched(self.stream([name], examples, batch_size, key="name"), "batch")
        parts = [part[name] for part in stream]
        _raise_first_failure(examples)
        return np.concatenate(parts)

    def attention(self, images: Any, *, batch_size: int = 8) -> np.ndarray:
        """Attention weights of every block: float32 [L, B, heads, N, N].

        N: class and distillation token, if any, then the grid row by row. UserError if the model
        has no attention, or an image cannot be read.
        """
        return self.look(images, batch_size=batch_size)["attention"]

    def look(
        self, images: Any, what: str | Sequence[str] = "attention", *, batch_size: int = 8
    ) -> dict[str, np.ndarray]:
        """Internals of every block: float32 arrays [L, B, ...], see `models/look.py`.

        UserError for an unknown name, a model without attention, or an image that cannot be read.
        """
        names = (what,) if isinstance(what, str) else tuple(what)

        def function(params: Any, images: jax.Array) -> dict[str, jax.Array]:
            internals = look(self.module, params, images, names)
            return {n: jnp.asarray(x.swapaxes(0, 1), jnp.float32) for n, x in internals.items()}

        examples = self._examples(images)
        outputs = self._outputs(("look", *names), function, examples, batch_size)
        parts = list(watched(outputs, "batch"))
        _raise_first_failure(examples)
        return {n: np.concatenate([part[n] for part in parts]).swapaxes(0, 1) for n in names}

    def stream(
        self, names: Sequence[str], examples: Examples, batch_size: int, key: str = "--features"
    ) -> Iterator[dict[str, np.ndarray]]:
        """Features of examples, batch by batch on all devices: `{name: float32 [n, ...]}`.

        If `labels` or `grid` are among the names, also these of the examples, int32.

        Args:
          names: of `models/features.py`.
          examples: see `pipeline.Examples`, such as a `Dataset` or `Images`.
          batch_size: over all devices; rounded up to a multiple of their number.
          key: for errors.
        """
        features, head = [name for name in names if name not in ALONG], self.text_head
        if head is None or features != ["logits"]:
            features = check_features(self.module, features, key)
        function, along = feature_function(self.module, features), ALONG.keys() & set(names)
        parts = self._outputs(("features", *names), function, examples, batch_size, along=along)
        if head and "logits" in features:
            return ({**part, "logits": np.asarray(head.logits(part["logits"]))} for part in parts)
        return parts

    def open_dataset(self, **options: Any) -> Dataset:
        """A split with the model's own preprocessing; see `create_dataset` for the other options.

        `on_bad_image` "" means that of the run. UserError: see there; or the preprocessing does not
        fit the model.
        """
        input_chain(self.description)
        options["on_bad_image"] = options.get("on_bad_image") or self.on_bad_image
        return create_dataset(**options, preprocess=self.description.eval_preprocess)

    @property
    def on_bad_image(self) -> str:
        """How the run of this work directory treated damaged images; else `error`."""
        match self._run_config():
            case {"dataset": {"on_bad_image": str(setting)}}:
                return setting
        return "error"

    def test_data(self) -> dict[str, str]:
        """The test dataset, for `open_dataset`, of the run of this work directory.

        UserError if it is not a work directory, or the run has no evaluator.
        """
        match self._run_config():
            case {"dataset": dict() as training, "evaluators": dict() as evaluators} if evaluators:
                test = evaluators["test" if "test" in evaluators else next(iter(evaluators))]
                with reading(f"config.json of {self.source}"):
                    return EvaluatorKeys.of(test)[0].data(training)
        raise UserError(f"{self.source} is not a run with test data: give --dataset.")

    def objective(self) -> dict[str, Any]:
        """The objective of the run of this work directory, by key; UserError if it is none."""
        match self._run_config():
            case {"objective": dict() as objective}:
                return dict(objective)
        raise UserError(f"{self.source} is not a run: what it learnt is not known.")

    @property
    def example_keys(self) -> tuple[str, ...]:
        """What the run of this work directory learnt from; of other weights the image alone."""
        match self._run_config():
            case {"objective": {"name": str(name)}} if name in OBJECTIVES:
                return tuple(OBJECTIVES[name].example_keys)
        return ("image",)

    def _run_config(self) -> Any:
        """The config of the run of this work directory or checkpoint; else None."""
        path = Path(os.path.expanduser(self.source.partition("#")[0]))
        config = (path if path.is_dir() else path.parent) / "config.json"  # also for RUN/best
        return read_json(config) if config.is_file() else None

    def without_head(self) -> Model:
        """The same model up to its representation; UserError if it has no head."""
        description, flat = self.description, flatten_names(self.params)
        headless = {"num_classes": 0, "representation_size": None}
        sizes = {key: headless.get(key, value) for key, value in description.model.items()}
        none: Any = {"class_names": (), "similarity": None, "values": None}
        description = dataclasses.replace(description, model=sizes, **none)
        module = clone_with(self.module, **headless)
        names = flatten_names(abstract_params(module, description.image_shape))
        dropped = dict.fromkeys(flat.keys() - names, "dropped (--drop_head)")
        if not dropped:
            raise UserError(f"--drop_head: {self.source} has no head.")
        loaded = [name for name in self.report["loaded"] if name in names]
        report = {**self.report, "loaded": loaded, "dropped": self.report["dropped"] | dropped}
        params = unflatten_names({name: flat[name] for name in names})
        changed: Any = {"params": params, "description": description, "report": report}
        return dataclasses.replace(self, module=module, text_head=None, **changed)

    def zero_shot(
        self, images: Any, texts: Sequence[str], *, prompts: Sequence[str] = ("{}",)
    ) -> list[Any]:
        """The texts by how well they fit an image: [(text, probability), ...], as by `predict`.

        A later call with the same texts and prompts compiles nothing. UserError: see `with_classes`
        and `predict`.
        """
        key = "zero_shot", tuple(texts), tuple(prompts)
        if (classifier := self._steps.get(key)) is None:
            classifier = self.with_classes(texts, prompts)
            self._steps.pop(self._steps.get("zero_shot"), None)  # it holds device memory
            self._steps.update({"zero_shot": key, key: classifier})
        return classifier.predict(images, top=classifier.num_outputs)

    def with_classes(
        self, class_names: Sequence[str], prompts: Sequence[str] = ("{}",), texts: Any = None
    ) -> Model:
        """This image tower as a classifier by class names (2103.00020, 3.1).

        A class is the direction of its name's mean embedding over all prompts. Its logit is
        scale * cosine + bias, and its probability a softmax, or a sigmoid if the towers were
        trained with a bias (SigLIP). Of weights without a temperature the logits are cosines, and
        there are no probabilities, which is logged.

        Args:
          class_names: in the order of the outputs.
          prompts: texts with {} in place of a name, see `data.text.read_prompts`.
          texts: the text tower trained with this one, or what has its `features`; None: that of
            the same source.

        UserError: a prompt without {}, no such tower, or no tokenizer beside it.
        """
        class_names = [class_names] if isinstance(class_names, str) else class_names
        if texts is None and self.load_texts is not None:
            with naming(f"the text tower of {self.source}"):
                texts = self.load_texts()
        embeddings = texts.features(fill_prompts(prompts, class_names), "logits")
        classes = np.asarray(class_vectors(embeddings, len(class_names)))
        pair = self.description.similarity or texts.description.similarity
        if pair is None:
            text = f"{self.source} has no temperature (logit_scale, or t), so probabilities are not"
            logging.warning(f"{text} known, and logits are cosines; take the file of both towers.")
            by, head = "none", TextHead(self.module, classes)
        else:
            by = "softmax" if pair.bias is None else "sigmoid"
            head = TextHead(self.module, classes, pair.scale, pair.bias or 0.0)
        new: Any = {"class_names": tuple(class_names), "probabilities_by": by}
        description = dataclasses.replace(self.description, **new)
        return dataclasses.replace(self, description=description, text_head=head)

    def reader(self, dataset: Any, batch_size: int) -> Reader:
        """Reads examples on all devices, with one thread per core; `batch_size` is positive."""
        if type(batch_size) is not int or batch_size < 1:
            raise UserError(f"--batch_size={batch_size!r} must be at least 1.")
        shards = math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)
        count = dataset.num_examples
        fitting = -(-min(batch_size, count) // shards) * shards
        threads = min(os.cpu_count() or 1, 16) if count > 1 else 0
        loader = {"num_threads": threads, "num_workers": 0, "prefetch": 2}
        return Reader(dataset, self.mesh, fitting, loader)

    @functools.cached_property
    def mesh(self) -> Any:
        """All devices, each with all parameters."""
        return create_mesh()

    @functools.cached_property
    def placed_params(self) -> Any:
        """The parameters on the devices."""
        return jax.device_put(self.params, replicated(self.mesh))

    def _examples(self, images: Any) -> Any:
        """Images or texts as given by a user, for the pipeline."""
        if self.is_text:
            is_input = getattr(images, "dtype", None) == np.int32
            return Inputs(np.asarray(images) if is_input else self.preprocess(images))
        if isinstance(images, Patches):
            examples: Any = Inputs(images)
        elif isinstance(images, np.ndarray | jax.Array) and np.issubdtype(
            images.dtype, np.floating
        ):
            size, (black, white) = self.description.image_shape, input_range(self.description)
            low, high = np.minimum(black, white), np.maximum(black, white)
            span = high - low  # tolerance for noise
            fits = images.shape[1:] == size
            if not fits or not np.all((images >= low - span) & (images <= high + span)):
                wanted = f"[B, {', '.join(map(str, size))}], {low.min():.3g} to {high.max():.3g}"
                given = f"{list(images.shape)}"
                given += f", {np.min(images):.4g} to {np.max(images):.4g}" if images.size else ""
                text = f"float images must be model inputs, {wanted}, not {given}"
                raise UserError(f"{text}; `preprocess` takes uint8 pixels of any size.")
            examples = Inputs(np.asarray(images))
        else:
            examples = Images(images if _is_batch(images) else [images], self.description)
        if not examples.num_examples:
            raise UserError("no images given.")
        return examples

    def _outputs(
        self,
        key: Any,
        function: Callable[[Any, jax.Array], dict[str, jax.Array]],
        examples: Any,
        batch_size: int,
        *,
        along: Collection[str] = (),
    ) -> Iterator[dict[str, np.ndarray]]:
        """Outputs of `function(params, images)`, compiled once per `key`."""
        if key not in self._steps:
            apply = of_batches(function, family_of(self.module).input)

            def step(params: Any, batch: Any) -> dict[str, jax.Array]:
                outputs = apply(params, batch)
                return {**outputs, **{name: batch[ALONG[name]] for name in along}}

            self._steps[key] = compile_outputs(step, self.mesh)
        reader = self.reader(examples, batch_size)
        return stream_outputs(self._steps[key], self.placed_params, reader)

    def __repr__(self) -> str:
        return f"Model({self.source!r}, {self._sizes()})"

    def __str__(self) -> str:
        """Three lines: the model, its inputs and outputs, and the preprocessing."""
        model = self.description.model
        title = f"{MODELS[model['name']].title.partition(' (')[0]} {variant_of(model)}".strip()
        names = f": {list_names(self.class_names, 3)}" if self.class_names else ""
        return (
            f"{title} from {self.source} ({self.format})\n"
            f"  {self._sizes()}{names}\n"
            f"  preprocessing: {self.description.eval_preprocess}"
        )

    def _sizes(self) -> str:
        size, grid = self.description.image_shape, self.description.grid
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        op = parse(self.description.eval_preprocess).patchify
        taken = f"texts of {size[0]} tokens"
        if grid is not None:
            taken = f"images {'x'.join(map(str, size))}, tokens {grid[0]}x{grid[1]}"
            taken = f"images of any shape in {op.lengths[0]} patches at most" if op else taken
        return f"{count:,} parameters, {taken}, {self.num_outputs} outputs"


def _is_batch(images: Any) -> bool:
    if isinstance(images, Patches):
        return True
    ndim = getattr(images, "ndim", 1 if isinstance(images, Iterable) else 0)
    return ndim in (1, 4) and not isinstance(images, str | bytes)


def _raise_first_failure(examples: Any) -> None:
    for index in sorted(examples.failures):
        raise UserError(f"{examples.name(index)}: {examples.failures[index]}")
