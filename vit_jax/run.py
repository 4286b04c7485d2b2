"""The parts that a training is made of, built from a config and checked against each other."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clu import parameter_overview
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import check_kinds, evaluator_keys
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.pipeline import check_repeated_augmentation
from vit_jax.errors import UserError, as_user_error, check_known
from vit_jax.evaluators.create import create_evaluator
from vit_jax.evaluators.stream import Reader
from vit_jax.hardware.flops import train_flops
from vit_jax.models.create import create_model
from vit_jax.models.tokens import token_grid
from vit_jax.objectives.create import OBJECTIVES, create_objective
from vit_jax.objectives.objective import FrozenModel, Objective, Task
from vit_jax.parameters.names import count_parameters, flatten_names, unflatten_names
from vit_jax.parameters.sharding import check_batch_size, parameter_shardings, state_shardings
from vit_jax.training.config_checks import check_config
from vit_jax.training.gradient import Gradient, create_gradient
from vit_jax.training.length import to_steps
from vit_jax.training.mixing import Mixing, create_mixing
from vit_jax.training.optimizer import Schedule, create_optimizer, create_schedule
from vit_jax.training.state import TrainState, create_train_state
from vit_jax.training.step import make_train_step, step_shardings
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.description import MODEL_FILE, PARAMETERS_FILE, Description


@dataclasses.dataclass(frozen=True)
class Run:
    """What one config stands for; nothing is computed yet. `create_run` builds it."""

    config: ConfigDict
    mesh: Mesh
    dataset: Dataset
    eval_datasets: dict[str, Dataset]
    total_steps: int
    objective: Objective
    mixing: Mixing | None
    gradient: Gradient
    schedule: Schedule
    tx: optax.GradientTransformation
    evaluators: dict[str, Any]

    @property
    def batch_size(self) -> int:
        return self.config.dataset.batch_size

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """[H, W, C]"""
        return image_shape(self.dataset)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        model = self.objective.model
        return token_grid(self.image_shape[:2], model.patch_size, model.resnet_layers)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Identity of the data and constants, so that a resumed run notices when they change."""
        datasets = {"train": self.dataset, **self.eval_datasets}
        found = {key: dataset.fingerprint for key, dataset in datasets.items()}
        for name, tree in self.objective.constants.items():
            digest = hashlib.blake2b(digest_size=8)
            for key, array in flatten_names(tree).items():
                digest.update(key.encode() + b"\0" + np.ascontiguousarray(array).tobytes())
            found[f"constant {name}"] = digest.hexdigest()
        return found

    @property
    def description(self) -> Description:
        """What a user of the parameters has to know."""
        return Description(
            model={**self.config.model, "num_classes": self.objective.num_outputs},
            image_shape=self.image_shape,
            grid=self.grid,
            class_names=self.objective.class_names,
            eval_preprocess=self.config.dataset.eval_preprocess,
        )

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes and types of the state."""
        return jax.eval_shape(lambda: self.init_state(jax.random.key(0)))

    def init_state(self, rng: jax.Array) -> TrainState:
        """A random state; pure, so that its shapes can be had without computing it."""
        image = jnp.zeros((1, *self.image_shape), self.dataset.element_spec["image"].dtype)
        return self.start_state(self.objective.init(rng, {"image": image}))

    def start_state(self, params: Any) -> TrainState:
        """The state before the first update of these parameters."""
        return create_train_state(params, self.tx, polyak_decay=self.config.train_step.polyak_decay)

    def train_flops_per_image(self) -> float:
        """See `hardware.flops.train_flops`."""
        params = {**self.abstract_state.params, **jax.eval_shape(lambda: self.objective.constants)}
        spec = self.dataset.element_spec["image"]
        batch = {
            "image": jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype),
            "label": jax.ShapeDtypeStruct((1,), jnp.int32),
            "mask": jax.ShapeDtypeStruct((1,), jnp.float32),
        }
        return train_flops(self.objective, params, batch)

    def abstract_constants(self) -> Any:
        """Shapes of the constants, with the shardings that the table gives them."""
        constants = jax.eval_shape(lambda: self.objective.constants)
        return with_shardings(constants, parameter_shardings(constants, self.mesh))

    def place_constants(self) -> Any:
        """The constants of the objective on the devices."""

        def place(array: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
            array = np.asarray(array)
            return jax.make_array_from_callback(array.shape, like.sharding, array.__getitem__)

        return jax.tree.map(place, self.objective.constants, self.abstract_constants())

    def train_step(self, state: Any, constants: Any) -> Callable[..., Any]:
        """The compiled update, (state, constants, batch) -> (state, metrics).

        Args:
          state, constants: trees of arrays or shapes that have shardings.
        """
        step = make_train_step(
            self.objective,
            self.tx,
            seed=self.config.seed,
            gradient=self.gradient,
            freeze=self.config.optimizer.freeze,
            mixing=self.mixing,
            **self.config.train_step,
        )
        state, constants = jax.tree.map(lambda leaf: leaf.sharding, (state, constants))
        return jax.jit(step, **step_shardings(state, constants, self.mesh))


def create_run(
    config: ConfigDict,
    mesh: Mesh,
    open_dataset: Callable[..., Dataset] | None = None,
) -> Run:
    """Builds the parts; opens the data and compares all sizes with each other.

    Args:
      config: with the keys of `vit_jax/config.py`.
      mesh: from `create_mesh`.
      open_dataset: with the keywords of `create_dataset`, replaces it where the data are not here.

    Raises:
      UserError: what the user got wrong.
    """
    check_kinds(config)
    check_config(config)
    data, batch_size = config.dataset, config.dataset.batch_size
    check_batch_size("dataset.batch_size", batch_size, mesh, config.train_step.accumulation_steps)
    check_repeated_augmentation(data.repeated_augmentation, batch_size)
    mixing = create_mixing(**config.mix)
    needs_label = "label" in OBJECTIVES[config.objective.name].example_keys
    open_dataset = functools.partial(open_dataset or open_checked, needs_label=needs_label)
    dataset = open_dataset(
        name=data.name,
        data_dir=data.data_dir,
        split=data.split,
        label_key=data.label_key,
        preprocess=data.preprocess,
        on_bad_image=data.on_bad_image,
    )
    eval_datasets = {key: _eval_dataset(config, key, open_dataset) for key in config.evaluators}
    total_steps = to_steps(
        **config.duration, num_examples=dataset.num_examples, batch_size=batch_size
    )
    task = Task(
        build_model=lambda num_outputs: create_model(**config.model, num_classes=num_outputs),
        image_shape=image_shape(dataset),
        class_names=dataset.class_names,
        load_model=functools.partial(_load_frozen, dataset, config.model.dtype),
    )
    objective = create_objective(**config.objective, task=task)
    if mixing is not None and "label" not in objective.example_keys:
        raise UserError(
            f"mix.* mixes images with their labels, which objective.name={config.objective.name!r} "
            "does not read; set both alphas to 0."
        )
    optimizer, schedule_keys = dict(config.optimizer), dict(config.schedule)
    schedule_keys["warmup_steps"] = _fitting_warmup(total_steps, **schedule_keys)
    schedule = create_schedule(
        **schedule_keys, learning_rate=optimizer.pop("learning_rate"), total_steps=total_steps
    )
    run = Run(
        config=config,
        mesh=mesh,
        dataset=dataset,
        eval_datasets=eval_datasets,
        total_steps=total_steps,
        objective=objective,
        mixing=mixing,
        gradient=create_gradient(**config.gradient),
        schedule=schedule,
        tx=create_optimizer(**optimizer, schedule=schedule),
        evaluators={},
    )
    _ = run.grid  # images that patches do not divide
    for key in config.evaluators:
        run.evaluators[key] = _evaluator(run, key)
    if config.checkpoint.best_metric:
        names = [f"{key}/{name}" for key, e in run.evaluators.items() for name in e.metric_names]
        check_known("checkpoint.best_metric", config.checkpoint.best_metric, names)
    return run


def image_shape(dataset: Dataset) -> tuple[int, int, int]:
    height, width, channels = dataset.element_spec["image"].shape
    return height, width, channels


def open_checked(**kwargs: Any) -> Dataset:
    """`create_dataset`, with damaged files found now."""
    return create_dataset(**kwargs).check()


def _load_frozen(dataset: Dataset, dtype: str, source: str) -> FrozenModel:
    """A model of any format for the images and classes of a dataset; loop form of the blocks.

    Raises:
      UserError: see `load_model`; also other channels, or not the classes of the data.
    """
    from vit_jax.inference.class_order import match_classes
    from vit_jax.inference.inputs import input_range
    from vit_jax.inference.load import load_model

    images = image_shape(dataset)
    try:
        model = load_model(source, image_size=images[:2], dtype=dtype)
        found = model.description
        if found.image_shape != images:
            raise UserError(f"it takes images of {found.image_shape}, the data have {images}.")
        outputs = match_classes(dataset.class_names, found.class_names, found.model["num_classes"])
    except UserError as error:
        raise as_user_error(f"objective.teacher={source!r}: {error}", error) from error
    black, white = input_range(found)
    return FrozenModel(model.module, model.params, black, white, outputs)


def _fitting_warmup(total_steps: int, warmup_steps: int, cooldown_steps: int, **_: Any) -> int:
    """A tenth of the training where a recipe was shortened below its own warm-up."""
    if 0 < total_steps <= warmup_steps + cooldown_steps and not cooldown_steps:
        logging.info(
            f"schedule.warmup_steps={warmup_steps} does not fit into {total_steps} steps; warming "
            f"up over {total_steps // 10}."
        )
        return total_steps // 10
    if 2 * warmup_steps > total_steps > 0:
        logging.warning(
            f"schedule.warmup_steps={warmup_steps} is more than half of the {total_steps} steps."
        )
    return warmup_steps


def _eval_dataset(config: ConfigDict, key: str, open_dataset: Callable[..., Dataset]) -> Dataset:
    """The data of an evaluator; unreadable files are found here, before any training."""
    evaluator, data = config.evaluators[key], config.dataset
    own = bool(evaluator.dataset)
    try:
        return open_dataset(
            name=evaluator.dataset or data.name,
            data_dir=evaluator.data_dir or data.data_dir,
            split=evaluator.split,
            label_key=evaluator.label_key or ("" if own else data.label_key),
            preprocess=evaluator.preprocess or data.eval_preprocess,
            on_bad_image=data.on_bad_image,
        )
    except UserError as error:
        # The readers speak of dataset.split: the evaluator's is meant.
        message = f"evaluators.{key} (split={evaluator.split!r}): {error}"
        raise as_user_error(message, error) from error


def _evaluator(run: Run, key: str) -> Any:
    keys, dataset = dict(run.config.evaluators[key]), run.eval_datasets[key]
    if run.objective.class_names and dataset.class_names != run.objective.class_names:
        dataset = _with_our_labels(run, key, dataset)
    if image_shape(dataset) != run.image_shape:
        raise UserError(
            f"evaluators.{key} reads images of {image_shape(dataset)}, training reads "
            f"{run.image_shape}; make dataset.eval_preprocess="
            f"{run.config.dataset.eval_preprocess!r} give the same size."
        )
    batch_size = keys["batch_size"] or run.batch_size
    check_batch_size(f"evaluators.{key}.batch_size", batch_size, run.mesh)
    reader = Reader(
        dataset, run.mesh, batch_size, dict(run.config.loader), run.objective.example_keys
    )
    shared = ("name", *inspect.signature(evaluator_keys).parameters)
    own_keys = {name: value for name, value in keys.items() if name not in shared}
    return create_evaluator(keys["name"], objective=run.objective, reader=reader, **own_keys)


def _with_our_labels(run: Run, key: str, dataset: Dataset) -> Dataset:
    """An evaluator's data of other classes, matched by name; they may be some of the training's."""
    from vit_jax.inference.class_order import match_classes, relabel

    names = run.objective.class_names
    try:
        way_out = "classes of an evaluator must be among those of the training"
        outputs = match_classes(dataset.class_names, names, len(names), way_out=way_out)
    except UserError as error:
        raise as_user_error(f"evaluators.{key}: {error}", error) from error
    return relabel(dataset, outputs)


def describe(run: Run, workdir: str) -> None:
    """Writes `model.json` and the table of parameters, and logs what is about to be trained."""
    params = run.abstract_state.params
    if jax.process_index() == 0:
        run.description.write(Path(workdir) / MODEL_FILE)
        table = parameter_overview.get_parameter_overview(params, include_stats=False)
        (Path(workdir) / PARAMETERS_FILE).write_text(table + "\n")
    size = "x".join(map(str, run.image_shape))
    logging.info(
        f"{workdir}: {count_parameters(params):,} parameters, {run.objective.num_outputs} outputs, "
        f"{run.dataset.num_examples} training images of {size}, {run.total_steps} steps of "
        f"{run.batch_size}, {jax.device_count()} devices."
    )


def initial_state(run: Run, checkpoints: CheckpointManager) -> TrainState:
    """Shapes first, then shardings, then arrays: workdir checkpoint, pre-trained, or random."""
    shardings = state_shardings(run.abstract_state, run.mesh)
    abstract_state = with_shardings(run.abstract_state, shardings)
    restored = checkpoints.restore(abstract_state)
    if restored is not None:
        step, state = restored
        logging.info("Resuming from the checkpoint of step %d.", step)
        return state

    source = run.config.pretrained.source
    if not source:
        rng = jax.random.key(run.config.seed)
        return jax.jit(run.init_state, out_shardings=shardings)(rng)
    from vit_jax.pretrained.load import load_pretrained  # readers of many formats

    try:
        loaded, _ = load_pretrained(
            **run.config.pretrained,
            like=abstract_state.params,
            target_grid=run.grid,
            model=run.config.model,
        )
    except UserError as error:
        raise as_user_error(f"pretrained.source={source!r}: {error}", error) from error
    arrays = flatten_names(loaded)
    del loaded  # so that each array goes as soon as it is on its devices
    params = _place(run, arrays, flatten_names(shardings.params))
    return jax.jit(run.start_state, out_shardings=shardings, donate_argnums=0)(params)


def with_shardings(abstract_tree: Any, shardings: Any) -> Any:
    """Shapes that say where they lie."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_tree,
        shardings,
    )


def _place(run: Run, arrays: dict[str, Any], shardings: dict[str, jax.sharding.Sharding]) -> Any:
    """Arrays of the host to the devices, and random ones where only a shape is given (a new head).

    Empties `arrays`: a large model is never on the host and on the devices as a whole.
    """
    new = [name for name, leaf in arrays.items() if isinstance(leaf, jax.ShapeDtypeStruct)]
    draw = jax.jit(
        lambda rng: {name: flatten_names(run.init_state(rng).params)[name] for name in new},
        out_shardings={name: shardings[name] for name in new},
    )
    placed = dict(draw(jax.random.key(run.config.seed)))
    for name in [name for name in arrays if name not in placed]:
        array = arrays.pop(name)
        placed[name] = jax.make_array_from_callback(array.shape, shardings[name], array.__getitem__)
    return unflatten_names(placed)
