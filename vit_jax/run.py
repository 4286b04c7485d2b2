"""The parts of a training run, built from a config and checked against each other."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import check_kinds, check_values
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.pipeline import check_repeated_augmentation
from vit_jax.errors import UserError, as_user_error, check_known
from vit_jax.evaluation import create_evaluators, image_shape, of_features, open_eval_data
from vit_jax.models.create import create_model
from vit_jax.models.tokens import token_grid
from vit_jax.objectives.create import OBJECTIVES, create_objective
from vit_jax.objectives.objective import Batch, FrozenModel, Objective, Task
from vit_jax.parameters.initial import shapes_of
from vit_jax.parameters.names import fingerprint
from vit_jax.parameters.sharding import (
    check_batch_size,
    compiler_options,
    parameter_shardings,
    state_shardings,
    with_shardings,
)
from vit_jax.training.gradient import Gradient, create_gradient
from vit_jax.training.length import fit_warmup, to_steps
from vit_jax.training.mixing import Mixing, create_mixing
from vit_jax.training.optimizer import Schedule, create_optimizer, create_schedule
from vit_jax.training.state import TrainState, create_train_state, initial_state
from vit_jax.training.step import make_train_step, step_shardings
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.description import Description


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts that a config describes; nothing is computed yet. `create_run` builds it."""

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
            found[f"constant {name}"] = fingerprint(tree)
        return found

    @property
    def description(self) -> Description:
        """What users of the parameters need to know."""
        return Description(
            model={**self.config.model, "num_classes": self.objective.num_outputs},
            image_shape=self.image_shape,
            grid=self.grid,
            class_names=self.objective.class_names,
            eval_preprocess=self.config.dataset.eval_preprocess,
            probabilities_by=self.objective.probabilities_by,
        )

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes and types of the state."""

        def init(model: Any) -> Any:
            shallow = copy.copy(self.objective)
            shallow.model = model
            return shallow.init(jax.random.key(0), self._one_image())

        return jax.eval_shape(self.start_state, shapes_of(self.objective.model, init))

    def _one_image(self) -> Batch:
        spec = self.dataset.element_spec["image"]
        return {"image": jnp.zeros((1, *spec.shape), spec.dtype)}

    def init_params(self, rng: jax.Array) -> Any:
        """Random parameters; pure."""
        return self.objective.init(rng, self._one_image())

    def init_state(self, rng: jax.Array) -> TrainState:
        """The state before the first update of random parameters; pure."""
        return self.start_state(self.init_params(rng))

    def start_state(self, params: Any) -> TrainState:
        """The state before the first update of these parameters."""
        return create_train_state(params, self.tx, polyak_decay=self.config.train_step.polyak_decay)

    def sharded_state(self) -> TrainState:
        """Shapes and types of the state, with shardings."""
        return with_shardings(self.abstract_state, state_shardings(self.abstract_state, self.mesh))

    def initial_state(self, checkpoints: CheckpointManager) -> TrainState:
        """The state on the devices, see `training.state.initial_state`."""
        return initial_state(
            checkpoints,
            self.sharded_state(),
            init_params=self.init_params,
            start_state=self.start_state,
            load_params=self._load_params if self.config.pretrained.source else None,
            seed=self.config.seed,
        )

    def _load_params(self) -> Any:
        """The parameters of `pretrained.source` in this model's shapes and form."""
        from vit_jax.pretrained.load import load_pretrained  # readers of many formats

        keys, like = self.config.pretrained, self.abstract_state.params
        try:
            params, _ = load_pretrained(
                **keys, like=like, target_grid=self.grid, model=self.config.model
            )
        except UserError as error:
            raise as_user_error(f"pretrained.source={keys.source!r}: {error}", error) from error
        return params

    def train_flops_per_image(self) -> float:
        """See `hardware.flops.train_flops`."""
        from vit_jax.hardware.flops import train_flops

        params = {**self.abstract_state.params, **jax.eval_shape(lambda: self.objective.constants)}
        spec, label = self.dataset.element_spec["image"], self.dataset.element_spec["label"]
        batch = {
            "image": jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype),
            "label": jax.ShapeDtypeStruct((1, *label.shape), jnp.int32),
            "mask": jax.ShapeDtypeStruct((1,), jnp.float32),
        }
        return train_flops(self.objective, params, batch)

    def abstract_constants(self) -> Any:
        """Shapes of the objective's constants, with shardings."""
        constants = jax.eval_shape(lambda: self.objective.constants)
        return with_shardings(constants, parameter_shardings(constants, self.mesh))

    def place_constants(self) -> Any:
        """The objective's constants on the devices."""

        def place(array: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
            array = np.asarray(array)
            return jax.make_array_from_callback(array.shape, like.sharding, array.__getitem__)

        return jax.tree.map(place, self.objective.constants, self.abstract_constants())

    def train_step(self, state: Any, constants: Any) -> Callable[..., Any]:
        """The jitted update, for arrays or shapes with the shardings of `state` and `constants`."""
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
        return jax.jit(
            step,
            **step_shardings(state, constants, self.mesh),
            compiler_options=compiler_options(self.mesh),
        )


def create_run(
    config: ConfigDict,
    mesh: Mesh,
    open_dataset: Callable[..., Dataset] | None = None,
) -> Run:
    """Builds the parts; opens the data and compares all sizes with each other.

    `open_dataset` replaces `create_dataset` when the data are not here, or are given.

    Raises:
      UserError: a mistake in the config or the data.
    """
    check_kinds(config)
    check_values(config)
    data, batch_size = config.dataset, config.dataset.batch_size
    check_batch_size("dataset.batch_size", batch_size, mesh, config.train_step.accumulation_steps)
    check_repeated_augmentation(data.repeated_augmentation, batch_size)
    mixing = create_mixing(**config.mix)
    needs_label = "label" in OBJECTIVES[config.objective.name].example_keys
    open_dataset = functools.partial(open_dataset or open_checked, needs_label=needs_label)
    keys = ("name", "data_dir", "split", "label_key", "preprocess", "on_bad_image")
    dataset = open_dataset(**{key: data[key] for key in keys})
    eval_datasets = open_eval_data(config, open_dataset, image_shape(dataset))
    total_steps = to_steps(
        **config.duration, num_examples=dataset.num_examples, batch_size=batch_size
    )
    if needs_label:
        own = (eval_datasets[key] for key, e in config.evaluators.items() if not of_features(e))
        for each in (dataset, *own):
            _check_labels(config.objective.name, each)
    objective = create_objective(**config.objective, task=_task(config, dataset))
    if mixing is not None and "label" not in objective.example_keys:
        raise UserError(
            f"mix.* mixes images with their labels, which objective.name={config.objective.name!r} "
            "does not read; set both alphas to 0."
        )
    optimizer, schedule_keys = dict(config.optimizer), dict(config.schedule)
    schedule_keys["warmup_steps"] = fit_warmup(total_steps, **schedule_keys)
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
    _ = run.grid  # raises if patches do not divide the images
    run.evaluators.update(create_evaluators(config, eval_datasets, objective, mesh))
    if config.checkpoint.best_metric:
        names = [f"{key}/{name}" for key, e in run.evaluators.items() for name in e.metric_names]
        check_known("checkpoint.best_metric", config.checkpoint.best_metric, names)
    return run


def _check_labels(name: str, dataset: Dataset) -> None:
    """Raises UserError where the objective wants several labels per image, or does not."""
    several = OBJECTIVES[name].several_labels
    if bool(dataset.element_spec["label"].shape) != several:
        has, way_out = "one label", "a table with the column 'labels'"
        if not several:
            has, way_out = "several labels", "objective.name='multi_label'"
        raise UserError(
            f"dataset.name={dataset.name!r} has {has} per image, objective.name={name!r} is for "
            f"{'several' if several else 'one'}; set {way_out}."
        )


def _task(config: ConfigDict, dataset: Dataset) -> Task:
    def load_model(source: str) -> FrozenModel:
        from vit_jax.inference.frozen import load_frozen  # readers of many formats

        return load_frozen(
            "objective.teacher",
            source,
            image_shape=image_shape(dataset),
            class_names=dataset.class_names,
            dtype=config.model.dtype,
        )

    return Task(
        build_model=lambda num_outputs: create_model(**config.model, num_classes=num_outputs),
        image_shape=image_shape(dataset),
        class_names=dataset.class_names,
        load_model=load_model,
    )


def open_checked(**kwargs: Any) -> Dataset:
    """`create_dataset`, then a check for damaged files."""
    return create_dataset(**kwargs).check()
