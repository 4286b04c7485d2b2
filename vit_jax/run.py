"""The parts of a training run, built from a config and checked for consistency.

The `ConfigDict` ends here: one section per call, and only typed keyword arguments below.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import check_config
from vit_jax.data.datasets import Dataset
from vit_jax.data.pipeline import batch_spec, check_repeated_augmentation, needed_keys
from vit_jax.errors import naming
from vit_jax.evaluators.create import Evaluation, check_metrics, create_evaluations
from vit_jax.hardware.chips import find_chip
from vit_jax.models.description import Description
from vit_jax.models.kernels.attention import check_attention
from vit_jax.objectives.create import OBJECTIVES, create_objective
from vit_jax.objectives.objective import Objective
from vit_jax.parameters.sharding import (
    batch_sharding,
    check_batch_size,
    compiler_options,
    parameter_shardings,
    replicated,
    state_shardings,
    with_shardings,
)
from vit_jax.start import Start, create_start, place_array
from vit_jax.task import (
    at_patch_size,
    check_shapes,
    create_task,
    describe,
    feature_of,
    open_checked,
    open_data,
    with_classes,
    with_position_grid,
)
from vit_jax.training.gradients import GRADIENTS, create_gradient
from vit_jax.training.mixing import create_mixing
from vit_jax.training.optimizer import create_optimizer
from vit_jax.training.schedule import Schedule, check_polyak_decay, create_schedule, to_steps
from vit_jax.training.step import TrainState, create_train_state, make_train_step
from vit_jax.trees import fingerprint, merge_trees
from vit_jax.wording import unsigned


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a training run; nothing is computed yet. `create_run` builds it."""

    mesh: Mesh
    batch_size: int
    total_steps: int
    dataset: Dataset
    objective: Objective
    choices: Sequence[Objective]  # of which each update takes one
    start: Start
    train_step: Callable[..., Any]  # (state, constants, batch) -> (state, metrics); pure
    start_state: Callable[[Any], TrainState]  # parameters -> state before the first update; pure
    schedule: Schedule
    passes: int  # of an update, forward and backward over the batch
    evaluations: Mapping[str, Evaluation]
    descriptions: Mapping[str, Description]  # of each resulting model, by its prefix

    @property
    def datasets(self) -> dict[str, Dataset]:
        """Of training and evaluators, by key."""
        datasets = {"train": self.dataset}
        for evaluation in self.evaluations.values():
            datasets |= evaluation.datasets
        return datasets

    @property
    def fingerprints(self) -> dict[str, str]:
        """Identities of data and constants, so that a resumed run notices if they change."""
        data = {key: dataset.fingerprint for key, dataset in self.datasets.items()}
        constants = self.objective.constants.items()
        return data | {f"constant {name}": fingerprint(tree) for name, tree in constants}

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state, with shardings."""
        state = jax.eval_shape(self.start_state, self.start.shapes)
        return with_shardings(state, state_shardings(state, self.mesh, self.start.table))

    @functools.cached_property
    def abstract_constants(self) -> Any:
        """Shapes and dtypes of the objective's constants, with shardings."""
        shapes = jax.eval_shape(lambda: self.objective.constants)
        return with_shardings(shapes, parameter_shardings(shapes, self.mesh, self.start.table))

    def initial_state(self, seed: int, loaded: Any = None) -> TrainState:
        """The state before the first update, on the devices; `loaded`: see `Start.draw`."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        start = jax.jit(self.start_state, out_shardings=shardings, donate_argnums=0)
        return start(self.start.draw(self.mesh, seed, loaded))

    def place_constants(self) -> Any:
        """The objective's constants on the devices."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_constants)
        return jax.tree.map(place_array, self.objective.constants, shardings)

    @functools.cached_property
    def _merge(self) -> Callable[[Any], Any]:
        """`Start.merge` on the devices."""
        if self.start.lora is None:
            return lambda params: params
        shapes = jax.eval_shape(self.start.merge, self.abstract_state.params)
        places = parameter_shardings(shapes, self.mesh, self.start.table)
        return jax.jit(self.start.merge, out_shardings=places)

    def eval_params(self, state: TrainState) -> Any:
        """What the objective evaluates with, besides its constants."""
        return merge_trees(self._merge(state.eval_params), state.buffers)

    def result(self, params: Any) -> Any:
        """`eval_params` with the constants that are part of the result: a frozen tower."""
        towers = self.descriptions.keys() & self.objective.constants.keys()
        return {**params, **{name: self.objective.constants[name] for name in towers}}

    def jit_train_step(self) -> Callable[..., Any]:
        """The update, jitted for the mesh; the input state is donated."""
        state, constants = jax.tree.map(
            lambda leaf: leaf.sharding, (self.abstract_state, self.abstract_constants)
        )
        return jax.jit(
            self.train_step,
            in_shardings=(state, constants, batch_sharding(self.mesh)),
            out_shardings=(state, replicated(self.mesh)),
            donate_argnums=0,
            compiler_options=compiler_options(self.mesh),
        )

    def step_arguments(self) -> tuple[Any, Any, dict[str, jax.ShapeDtypeStruct]]:
        """Shapes of state, constants and the largest batch, with the shardings of training."""
        specs = [batch_spec(dataset, self.batch_size) for dataset in self.dataset.of_lengths()]
        spec = max(specs, key=lambda spec: sum(math.prod(one.shape) for one in spec.values()))
        batch = {
            key: jax.ShapeDtypeStruct(
                spec[key].shape, spec[key].dtype, sharding=batch_sharding(self.mesh)
            )
            for key in needed_keys(self.objective.example_keys, spec)
        }
        return self.abstract_state, self.abstract_constants, batch

    def compile_train_step(self) -> Callable[..., Any]:
        """`jit_train_step`, which a thread compiles from now on: the first call waits for it."""
        step = self.jit_train_step()
        lowered = step.lower(*self.step_arguments())  # type: ignore[attr-defined]
        pool = ThreadPoolExecutor(1)
        compiled = pool.submit(lowered.compile)
        pool.shutdown(wait=False)

        def update(state: TrainState, constants: Any, batch: Any) -> Any:
            compiled.result()  # JAX finds it again in the call
            return step(state, constants, batch)

        return update

    def flops(self) -> dict[str, Any]:
        """Arguments of the clock for the MFU; {} if it would be meaningless."""
        chip = find_chip(jax.devices()[0].device_kind)
        if chip is None or self.start.freeze:  # freezing skips part of the backward pass
            return {}
        peak_flops = chip.device_peak_flops * jax.device_count()
        return {"peak_flops": peak_flops, "flops_per_image": self.train_flops_per_image()}

    def train_flops_per_image(self) -> float:
        """Operations of an update per image, see `models.flops`; without remat and padding."""
        from vit_jax.models.flops import train_flops

        state, rng = self.abstract_state, jax.eval_shape(lambda: jax.random.key(0))

        def loss(objective: Objective, trained: Any, fixed: Any, batch: Any, rng: Any) -> Any:
            batch = objective.prepare(batch)
            return objective.loss(merge_trees(trained, fixed), batch, rng)

        trained = jax.eval_shape(self.start.merge, state.params)
        fixed = merge_trees(state.buffers, self.abstract_constants)
        specs = [batch_spec(dataset, 1) for dataset in self.dataset.of_lengths()]
        losses = [functools.partial(loss, objective) for objective in self.choices]
        flops = [train_flops(one, trained, fixed, x, rng) for one in losses for x in specs]
        return self.passes * sum(flops) / len(flops)


def create_run(
    config: ConfigDict,
    mesh: Mesh,
    open_dataset: Callable[..., Dataset] | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> Run:
    """Builds the parts; opens the data and checks that all sizes match.

    Args:
      config: with the keys of `config.get_config`; a mistake in it is a UserError.
      mesh: from `create_mesh`, set by `jax.set_mesh` if its devices are available.
      open_dataset: replaces `create_dataset` if the data are missing or passed by the user.
      on_wait: called before an evaluation waits for a batch.
    """
    check_config(config)
    config = with_position_grid(config)
    if "attention" in config.model:
        check_attention(config.model.attention, mesh.devices.flat[0].platform, config.model.dtype)
    kind, batch_size = OBJECTIVES[config.objective.name], config.dataset.batch_size
    num_parts = config.train_step.accumulation_steps
    check_batch_size("dataset.batch_size", batch_size, mesh, num_parts)
    check_repeated_augmentation(config.dataset.repeated_augmentation, batch_size)
    kind.check_accumulation(config.objective.name, num_parts)
    mixing = create_mixing(**config.mix, labels="label" in kind.example_keys)
    dataset, eval_data = open_data(config, open_dataset or open_checked)
    total_steps = to_steps(
        **config.duration, num_examples=dataset.num_examples, batch_size=batch_size
    )
    start_is = "pre-trained" if config.pretrained.source else "random"
    check_polyak_decay(config.train_step.polyak_decay, total_steps, start_is)
    objective = create_objective(create_task(config, dataset, total_steps), **config.objective)
    check_shapes(config, objective, dataset)
    sizes, image_size = config.train_step.patch_sizes, dataset.image_shape[:2]
    with naming(f"train_step.patch_sizes={sizes}"):
        choices = [at_patch_size(objective, image_size, size) for size in sizes]
    evaluated = choices[0] if choices else objective
    description = describe(config, objective, dataset)
    start = create_start(config, objective, dataset, description.position_grid)
    schedule = create_schedule(**config.schedule, total_steps=total_steps)
    tx = create_optimizer(
        **{**config.optimizer, "freeze": start.freeze}, schedule=schedule, table=start.table
    )
    evaluations = create_evaluations(
        config.evaluators,
        eval_data,
        objective=evaluated,
        mesh=mesh,
        batch_size=batch_size,
        loader=config.loader,
        feature_of=functools.partial(
            feature_of, evaluated, dataset.image_shape, start.model_shapes
        ),
        with_classes=functools.partial(with_classes, objective.class_names),
        on_wait=on_wait,
    )
    best, ending = config.checkpoint.best_metric, config.early_stopping
    check_metrics(evaluations, total_steps=total_steps, best_metric=best, **ending)
    step = make_train_step(
        objective,
        tx,
        seed=config.seed,
        gradient=create_gradient(**config.gradient),
        relative_rate=schedule.relative,
        mixing=mixing,
        to_model=start.to_model,
        accumulation_steps=num_parts,
        polyak_decay=config.train_step.polyak_decay,
        choices=choices,
    )
    start_state = functools.partial(
        create_train_state, tx=tx, polyak_decay=config.train_step.polyak_decay, split=start.split
    )
    return Run(
        mesh=mesh,
        batch_size=batch_size,
        total_steps=total_steps,
        dataset=dataset,
        objective=objective,
        choices=choices or [objective],
        start=start,
        train_step=step,
        start_state=start_state,
        schedule=schedule,
        passes=GRADIENTS[config.gradient.name].passes,
        evaluations=evaluations,
        descriptions=objective.describe(description),
    )


def to_plain(config: ConfigDict) -> dict[str, Any]:
    """The config as it is saved: URLs without signatures."""
    return jax.tree.map(lambda x: unsigned(x) if isinstance(x, str) else x, config.to_dict())


def complete_config(config: ConfigDict, workdir: str) -> ConfigDict:
    """Adds what `pretrained.source` determines, see `pretrained.adopt`; UserError if missing.

    And for images in shapes of their own the grid of the positions, see `with_position_grid`.
    """
    if config.pretrained.source:
        from vit_jax.pretrained.adopt import adopt  # imports readers of many formats

        rescales = not OBJECTIVES[config.objective.name].predicts_pixels
        config = adopt(config, workdir, rescales=rescales)
    return with_position_grid(config)
