"""The parts that a training is made of, built from a config and checked against each other."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from clu import parameter_overview
from ml_collections import ConfigDict

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.pipeline import check_repeated_augmentation
from vit_jax.errors import UserError, check_known, explained
from vit_jax.evaluators.create import create_evaluator
from vit_jax.models.create import create_model
from vit_jax.models.tokens import token_grid
from vit_jax.objectives.create import create_objective
from vit_jax.parameters.names import count_parameters, flatten_names, unflatten_names
from vit_jax.parameters.sharding import check_batch_size, state_shardings
from vit_jax.pretrained.formats.description import Description
from vit_jax.pretrained.load import MODEL_FILE, load_pretrained
from vit_jax.training.config_checks import check_config
from vit_jax.training.length import to_steps
from vit_jax.training.mixing import create_mixing
from vit_jax.training.optimizer import Schedule, create_optimizer, create_schedule
from vit_jax.training.state import TrainState, create_train_state
from vit_jax.training.step import jit_train_step
from vit_jax.workdir.checkpoints import CheckpointManager

PARAMETERS_FILE = "parameters.txt"


class Run:
    """Datasets, model, objective, optimizer and evaluators of one config.

    Building it opens the data and compares all sizes with each other, but computes nothing: what a
    user got wrong is a `UserError` here.

    `open_dataset`, with the keywords of `create_dataset`, replaces it where the data are not here.
    """

    def __init__(
        self,
        config: ConfigDict,
        mesh: jax.sharding.Mesh,
        open_dataset: Callable[..., Dataset] | None = None,
    ):
        self._open_dataset = open_dataset or open_checked
        self.config = config
        self.mesh = mesh
        data = config.dataset
        check_config(config)
        self.batch_size = data.batch_size
        accumulation_steps = config.train_step.accumulation_steps
        check_batch_size("dataset.batch_size", self.batch_size, mesh, accumulation_steps)
        check_repeated_augmentation(data.repeated_augmentation, self.batch_size)
        self.mixing = create_mixing(**config.mix)
        self.dataset = self._dataset("dataset", data.split, data.preprocess)
        self.eval_datasets = {
            key: self._dataset(
                f"evaluators.{key}",
                evaluator.split,
                evaluator.preprocess or data.eval_preprocess,
            )
            for key, evaluator in config.evaluators.items()
        }
        self.total_steps = to_steps(
            **config.duration, num_examples=self.dataset.num_examples, batch_size=self.batch_size
        )
        height, width, channels = self.dataset.element_spec["image"].shape
        self.image_shape = (height, width, channels)
        model_config = config.model
        self.model = create_model(**model_config, num_classes=self.dataset.num_classes)
        self.grid = token_grid((height, width), model_config.patch_size, model_config.resnet_layers)
        self.objective = create_objective(**config.objective, model=self.model)
        optimizer = dict(config.optimizer)
        schedule = dict(config.schedule)
        schedule["warmup_steps"] = self._fitting_warmup(**schedule)
        self.schedule: Schedule = create_schedule(
            **schedule,
            learning_rate=optimizer.pop("learning_rate"),
            total_steps=self.total_steps,
        )
        self.tx = create_optimizer(**optimizer, schedule=self.schedule)
        self.evaluators = {key: self._evaluator(key) for key in self.eval_datasets}
        self._check_best_metric(config.checkpoint.best_metric)

    def _fitting_warmup(self, warmup_steps: int, cooldown_steps: int, **_: Any) -> int:
        """A tenth of the training where a recipe was shortened below its own warm-up."""
        if 0 < self.total_steps <= warmup_steps + cooldown_steps and not cooldown_steps:
            fitting = self.total_steps // 10
            logging.info(
                "schedule.warmup_steps=%d does not fit into %d steps; warming up over %d.",
                *(warmup_steps, self.total_steps, fitting),
            )
            return fitting
        if 2 * warmup_steps > self.total_steps > 0:
            logging.warning(
                "schedule.warmup_steps=%d is more than half of the %d steps.",
                *(warmup_steps, self.total_steps),
            )
        return warmup_steps

    def _dataset(self, key: str, split: str, preprocess: str) -> Dataset:
        """Opens a split; unreadable files are found here, before any training."""
        data = self.config.dataset
        keys = ("name", "data_dir", "on_bad_image", "label_key")
        source = {key: data[key] for key in keys}
        try:
            return self._open_dataset(split=split, preprocess=preprocess, **source)
        except UserError as error:
            if key == "dataset":
                raise
            # The readers speak of dataset.split: the evaluator's is meant.
            raise explained(f"{key} (split={split!r}): {error}", error) from error

    def _evaluator(self, key: str) -> Any:
        evaluator, dataset = self.config.evaluators[key], self.eval_datasets[key]
        if dataset.class_names != self.dataset.class_names:
            raise UserError(
                f"evaluators.{key}.split={evaluator.split!r} has other classes than "
                f"dataset.split={self.config.dataset.split!r}."
            )
        if dataset.element_spec["image"].shape != self.image_shape:
            raise UserError(
                f"evaluators.{key} reads images of {dataset.element_spec['image'].shape}, training "
                f"reads {self.image_shape}; make dataset.eval_preprocess="
                f"{self.config.dataset.eval_preprocess!r} give the same size."
            )
        batch_size = evaluator.batch_size or self.batch_size
        check_batch_size(f"evaluators.{key}.batch_size", batch_size, self.mesh)
        return create_evaluator(
            evaluator.name,
            objective=self.objective,
            dataset=dataset,
            mesh=self.mesh,
            batch_size=batch_size,
            loader=dict(self.config.loader),
        )

    def _check_best_metric(self, best_metric: str) -> None:
        """Raises UserError for one that no evaluation has: no checkpoint would ever be best."""
        if not best_metric:
            return
        batch = {
            "image": jax.ShapeDtypeStruct((1, *self.image_shape), jnp.float32),
            "label": jax.ShapeDtypeStruct((1,), jnp.int32),
        }
        known = jax.eval_shape(self.objective.evaluate, self.abstract_state.params, batch)
        names = [f"{key}/{name}" for key in self.evaluators for name in (*known, "num_examples")]
        check_known("checkpoint.best_metric", best_metric, names)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Identity of the data, so that a resumed run notices when they have changed."""
        datasets = {"train": self.dataset, **self.eval_datasets}
        return {key: dataset.fingerprint for key, dataset in datasets.items()}

    @property
    def description(self) -> Description:
        """What a user of the parameters has to know."""
        return Description(
            model={**self.config.model, "num_classes": self.dataset.num_classes},
            image_shape=self.image_shape,
            grid=self.grid,
            class_names=self.dataset.class_names,
            eval_preprocess=self.config.dataset.eval_preprocess,
        )

    def jit_train_step(self, shardings: TrainState) -> Callable[..., Any]:
        """The compiled update for a state that lies so; see `train_step.jit_train_step`."""
        return jit_train_step(
            *(self.objective, self.tx, shardings, self.mesh),
            seed=self.config.seed,
            freeze=self.config.optimizer.freeze,
            mixing=self.mixing,
            **self.config.train_step,
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


def open_checked(**kwargs: Any) -> Dataset:
    """`create_dataset`, with damaged files found now."""
    return create_dataset(**kwargs).check()


def describe(run: Run, workdir: str) -> None:
    """Writes `model.json` and the table of parameters, and logs what is about to be trained."""
    params = run.abstract_state.params
    if jax.process_index() == 0:
        run.description.write(Path(workdir) / MODEL_FILE)
        table = parameter_overview.get_parameter_overview(params, include_stats=False)
        (Path(workdir) / PARAMETERS_FILE).write_text(table + "\n")
    logging.info(
        "%s: %s parameters, %d classes, %d training images of %s, %d steps of %d, %d devices.",
        *(workdir, f"{count_parameters(params):,}", run.dataset.num_classes),
        *(run.dataset.num_examples, "x".join(map(str, run.image_shape)), run.total_steps),
        *(run.batch_size, jax.device_count()),
    )


def initial_state(run: Run, checkpoints: CheckpointManager) -> TrainState:
    """Shapes first, then shardings, then arrays: workdir checkpoint, pre-trained, or random."""
    shardings = state_shardings(run.abstract_state, run.mesh)
    abstract_state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        *(run.abstract_state, shardings),
    )
    restored = checkpoints.restore(abstract_state)
    if restored is not None:
        step, state = restored
        logging.info("Continuing from the checkpoint of step %d.", step)
        return state

    if not run.config.pretrained.source:
        rng = jax.random.key(run.config.seed)
        return jax.jit(run.init_state, out_shardings=shardings)(rng)
    source = run.config.pretrained.source
    try:
        loaded, _ = load_pretrained(
            **run.config.pretrained,
            like=abstract_state.params,
            target_grid=run.grid,
            model=run.config.model,
        )
    except UserError as error:
        raise explained(f"pretrained.source={source!r}: {error}", error) from error
    arrays = flatten_names(loaded)
    del loaded  # so that each array goes as soon as it is on its devices
    params = _place(run, arrays, flatten_names(shardings.params))
    return jax.jit(run.start_state, out_shardings=shardings, donate_argnums=0)(params)


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
