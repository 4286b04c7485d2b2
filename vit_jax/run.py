"""The parts of a training run, built from a config and checked for consistency.

The `ConfigDict` ends here: one section per call, and only typed keyword arguments below.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import check_config
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.pipeline import batch_spec, check_repeated_augmentation
from vit_jax.errors import UserError, as_user_error, check_known, counted, unsigned
from vit_jax.evaluators.create import OF_OUTPUTS, Evaluation, create_evaluations, open_eval_data
from vit_jax.models.attention.choose import check_attention
from vit_jax.models.create import create_model, family_of
from vit_jax.models.description import Description
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.objectives.objective import Objective, Task, of_batches
from vit_jax.parameters.names import fingerprint, last_norm
from vit_jax.parameters.sharding import (
    batch_sharding,
    check_batch_size,
    compiler_options,
    parameter_shardings,
    replicated,
    state_shardings,
    with_shardings,
)
from vit_jax.training.gradients import GRADIENTS, create_gradient
from vit_jax.training.initial import Initial, initial_state, trace_initial
from vit_jax.training.mixing import create_mixing
from vit_jax.training.optimizer import create_optimizer
from vit_jax.training.schedule import (
    Schedule,
    create_relative_rate,
    create_schedule,
    fit_warmup,
    to_steps,
)
from vit_jax.training.step import TrainState, create_train_state, make_train_step


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a training run; nothing is computed yet. `create_run` builds it."""

    mesh: Mesh
    batch_size: int
    total_steps: int
    freezes: bool  # whether some parameters are frozen
    passes: int  # forward and backward passes over the batch per update
    dataset: Dataset
    objective: Objective
    schedule: Schedule
    evaluations: Mapping[str, Evaluation]
    train_step: Callable[..., Any]  # (state, constants, batch) -> (state, metrics); pure
    initial: Initial  # shapes of the parameters, and the program that draws them
    start_state: Callable[[Any], TrainState]  # parameters -> state before the first update; pure
    # The parameters of `pretrained.source` in this model's shapes and form, with shapes where an
    # array is to be random (a new head); None without a source.
    load_params: Callable[[], Any] | None
    standardize: Callable[[Any], Any] | None  # those parameters, see evaluators/standardize.py
    lora: Any  # `Lora`, or None
    descriptions: Mapping[str, Description]  # of each resulting model, by its prefix

    @property
    def description(self) -> Description:
        """That of the model, or of the first one if there are several."""
        return next(iter(self.descriptions.values()))

    @property
    def datasets(self) -> dict[str, Dataset]:
        """Of training and evaluators, by key."""
        found = {"train": self.dataset}
        for evaluation in self.evaluations.values():
            found |= evaluation.datasets
        return found

    @property
    def fingerprints(self) -> dict[str, str]:
        """Identities of data and constants, so that a resumed run notices if they change."""
        found = {key: dataset.fingerprint for key, dataset in self.datasets.items()}
        constants = self.objective.constants
        return found | {f"constant {name}": fingerprint(constants[name]) for name in constants}

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state, with shardings."""
        state = jax.eval_shape(self.start_state, self.initial.shapes)
        return with_shardings(state, state_shardings(state, self.mesh))

    @functools.cached_property
    def abstract_constants(self) -> Any:
        """Shapes and dtypes of the objective's constants, with shardings."""
        constants = jax.eval_shape(lambda: self.objective.constants)
        return with_shardings(constants, parameter_shardings(constants, self.mesh))

    @functools.cached_property
    def merge(self) -> Callable[[Any], Any]:
        """Maps the parameters of the state to those of the model, on the devices."""
        if self.lora is None:
            return lambda params: params
        shapes = jax.eval_shape(self.lora.merge, self.initial.shapes)
        return jax.jit(self.lora.merge, out_shardings=parameter_shardings(shapes, self.mesh))

    def result(self, params: Any) -> Any:
        """`params` with the constants that are part of the result: a frozen tower."""
        kept = self.descriptions.keys() & self.objective.constants.keys()
        return {**params, **{name: self.objective.constants[name] for name in kept}}

    def initial_state(self, seed: int) -> TrainState:
        """The state before the first update, on the devices."""
        loaded = self.load_params() if self.load_params else None
        loaded = self.standardize(loaded) if self.standardize else loaded
        if self.objective.start:
            loaded = {**(loaded or self.initial.shapes), **self.objective.start}
        return initial_state(
            self.initial, self.start_state, self.abstract_state, seed=seed, loaded=loaded
        )

    def place_constants(self) -> Any:
        """The objective's constants on the devices."""

        def place(array: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
            array = np.asarray(array)
            return jax.make_array_from_callback(array.shape, like.sharding, array.__getitem__)

        return jax.tree.map(place, self.objective.constants, self.abstract_constants)

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
        """Shapes of state, constants and batch, with the shardings used in training."""
        spec, sharding = batch_spec(self.dataset, self.batch_size), batch_sharding(self.mesh)
        batch = {
            key: jax.ShapeDtypeStruct(spec[key].shape, spec[key].dtype, sharding=sharding)
            for key in (*self.objective.example_keys, "mask")
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
        device = jax.devices()[0]
        if device.platform == "cpu" or self.freezes:  # freezing skips part of the backward pass
            return {}
        from vit_jax.parameters.chips import find_chip

        chip = find_chip(device.device_kind)
        if chip is None:
            return {}
        peak_flops = chip.device_peak_flops * jax.device_count()
        return {"peak_flops": peak_flops, "flops_per_image": self.train_flops_per_image()}

    def train_flops_per_image(self) -> float:
        """Operations of an update per image, see `models.flops`; without remat and padding."""
        from vit_jax.models.flops import TRAIN_OVER_FORWARD, forward_flops, jaxpr_flops

        forward = jaxpr_flops(self.initial.program.jaxpr)
        if not self.objective.constants:
            return self.passes * TRAIN_OVER_FORWARD * forward
        # Other models in the loss (a teacher) have no backward pass.
        params = {**self.initial.shapes, **self.abstract_constants}
        rng = jax.eval_shape(lambda: jax.random.key(0))
        with_teacher = forward_flops(self.objective.loss, params, batch_spec(self.dataset, 1), rng)
        return self.passes * ((TRAIN_OVER_FORWARD - 1) * forward + with_teacher)


def create_run(
    config: ConfigDict, mesh: Mesh, open_dataset: Callable[..., Dataset] | None = None
) -> Run:
    """Builds the parts; opens the data and checks that all sizes match.

    Args:
      config: with the keys of `config.get_config`.
      mesh: from `create_mesh`, set by `jax.set_mesh` if its devices are available.
      open_dataset: replaces `create_dataset` if the data are missing or passed by the user.

    Raises:
      UserError: a mistake in the config or the data.
    """
    check_config(config)
    if "attention" in config.model:
        platform = mesh.devices.flat[0].platform
        check_attention(config.model.attention, platform, config.model.dtype)
    data, batch_size = config.dataset, config.dataset.batch_size
    check_batch_size("dataset.batch_size", batch_size, mesh, config.train_step.accumulation_steps)
    check_repeated_augmentation(data.repeated_augmentation, batch_size)
    _check_accumulation(config.objective.name, config.train_step.accumulation_steps)
    mixing = create_mixing(**config.mix)
    if mixing is not None and not _reads_labels(config):
        raise UserError(
            f"mix.* mixes images with their labels, which objective.name={config.objective.name!r} "
            "does not read; set both alphas to 0."
        )
    opened = open_dataset or (lambda **options: create_dataset(**options).check())
    dataset, eval_data = _open_data(config, opened)
    total_steps = to_steps(
        **config.duration, num_examples=dataset.num_examples, batch_size=batch_size
    )
    keys = dict(config.objective)
    objective: Any = OBJECTIVES[keys.pop("name")](_task(config, dataset), **keys)
    model = objective.model
    if (given := family_of(model).input) not in objective.example_keys:
        raise UserError(
            f"model.name={config.model.name!r} takes a {given}, but objective.name="
            f"{config.objective.name!r} reads {', '.join(objective.example_keys)}."
        )
    for op in dataset.preprocess.ops:
        most = getattr(model, "vocab_size", None)
        if most is not None and (found := getattr(op, "num_tokens", 0)) > most:
            raise UserError(f"model.vocab_size={most} must be {found} for {op}.")
    is_text = family_of(model).input == "text"
    grid = None if is_text else model.token_grid(dataset.image_shape[:2])
    warmup_steps = fit_warmup(total_steps, **config.schedule)
    schedule = create_schedule(
        **{**config.schedule, "warmup_steps": warmup_steps}, total_steps=total_steps
    )
    lora = _create_lora(config)
    initial = trace_initial(lambda rng: _init(objective, lora, rng, batch_spec(dataset, 1)))
    shapes, freeze = initial.shapes, config.optimizer.freeze
    if lora is not None:
        freeze = lora.frozen(shapes, objective.own_parameters, freeze)
        shapes = jax.eval_shape(lora.merge, shapes)
    tx = create_optimizer(**{**config.optimizer, "freeze": freeze}, schedule=schedule)
    evaluations = create_evaluations(
        _evaluators(config),
        eval_data,
        objective=objective,
        mesh=mesh,
        batch_size=batch_size,
        loader=config.loader,
        feature_of=functools.partial(_feature, objective, dataset.image_shape, shapes),
        with_classes=functools.partial(_with_classes, objective.class_names),
    )
    _check_metrics(config, evaluations, total_steps)
    return Run(
        mesh=mesh,
        batch_size=batch_size,
        total_steps=total_steps,
        freezes=bool(freeze),
        passes=GRADIENTS[config.gradient.name].passes,
        dataset=dataset,
        objective=objective,
        schedule=schedule,
        evaluations=evaluations,
        train_step=make_train_step(
            objective,
            tx,
            seed=config.seed,
            gradient=create_gradient(**config.gradient),
            relative_rate=create_relative_rate(
                schedule, total_steps=total_steps, warmup_steps=warmup_steps
            ),
            freeze=freeze,
            mixing=mixing,
            **({} if lora is None else {"merge": lora.merge}),
            **config.train_step,
        ),
        initial=initial,
        start_state=functools.partial(
            create_train_state, tx=tx, polyak_decay=config.train_step.polyak_decay
        ),
        load_params=functools.partial(_load_params, config, shapes, objective.prefix, grid)
        if config.pretrained.source
        else None,
        standardize=_standardize(config, objective, dataset, shapes, mesh)
        if config.pretrained.standardize
        else None,
        lora=lora,
        descriptions=objective.describe(
            Description(
                model={**config.model, "num_classes": objective.num_outputs},
                image_shape=dataset.element_spec[family_of(model).input].shape,
                grid=grid,
                class_names=objective.class_names,
                eval_preprocess=data.eval_preprocess,
                probabilities_by=objective.probabilities_by,
            )
        ),
    )


def _create_lora(config: ConfigDict) -> Any:
    """The adapters of a run, or None; UserError if there is nothing to adapt."""
    keys = dict(config.lora)
    if not keys["rank"]:
        return None
    if not config.pretrained.source:
        raise UserError(
            f"lora.rank={keys['rank']} adapts pre-trained weights, but the weights are random; set "
            "pretrained.source."
        )
    from vit_jax.parameters.lora import Lora  # few runs need it

    return Lora(**keys)


def _init(objective: Any, lora: Any, rng: jax.Array, spec: Any) -> Any:
    """Random parameters, including adapters if any."""
    params = objective.init(rng, optax.tree.zeros_like(spec))
    return params if lora is None else lora.add(params, rng)


def to_plain(config: ConfigDict) -> dict[str, Any]:
    """The config as it is saved: URLs without signatures."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return unsigned(value) if isinstance(value, str) else value

    return plain(config.to_dict())


def complete_config(config: ConfigDict, workdir: str) -> ConfigDict:
    """Adds what `pretrained.source` determines, see `pretrained.adopt`; UserError if missing."""
    if not config.pretrained.source:
        return config
    from vit_jax.pretrained.adopt import adopt  # imports readers of many formats

    # Objectives on the pixels themselves expect [-1, 1].
    return adopt(config, workdir, rescales=_reads_labels(config))


def _check_accumulation(name: str, steps: int) -> None:
    kind = OBJECTIVES[name]
    if steps > 1 and kind.spans_batch and kind.embed is Objective.embed:
        raise UserError(
            f"train_step.accumulation_steps={steps} must be 1: objective.name={name!r} compares "
            "the examples of a batch and does not define `embed`."
        )


def objective_kind(config: ConfigDict) -> Any:
    """The class of the objective."""
    return OBJECTIVES[config.objective.name]


def _reads_labels(config: ConfigDict) -> bool:
    return "label" in objective_kind(config).example_keys


def _open_data(
    config: ConfigDict, open_dataset: Callable[..., Dataset]
) -> tuple[Dataset, dict[str, dict[str, Dataset]]]:
    """The data of the training and of each evaluator, with labels if the objective needs them."""
    name, sections = config.objective.name, _evaluators(config)
    keys = ("name", "data_dir", "split", "label_key", "preprocess", "on_bad_image")
    options = {key: config.dataset[key] for key in keys}
    dataset = open_dataset(**options, needs_label=_reads_labels(config))
    dataset = dataset.balanced(config.dataset.balance)
    dataset.check_keys(f"objective.name={name!r}", OBJECTIVES[name].example_keys)
    eval_data = open_eval_data(
        sections, dict(config.dataset), open_dataset, dataset.image_shape, OBJECTIVES[name]
    )
    if _reads_labels(config):
        outputs = [each for key, each in eval_data.items() if sections[key]["name"] in OF_OUTPUTS]
        for each in (dataset, *(opened for group in outputs for opened in group.values())):
            _check_labels(name, each)
    return dataset, eval_data


def _check_metrics(
    config: ConfigDict, evaluations: Mapping[str, Evaluation], total_steps: int
) -> None:
    """Raises UserError for a metric that is never computed, or too late to end the run early."""
    metrics = {key: each.evaluator.metric_names for key, each in evaluations.items()}
    known = [f"{key}/{name}" for key, names in metrics.items() for name in names]
    if best := config.checkpoint.best_metric:
        check_known("checkpoint.best_metric", best, known)
    if stops := config.early_stopping.metric:
        check_known("early_stopping.metric", stops, known)
        key = stops.rpartition("/")[0]
        every_steps, patience = config.evaluators[key].every_steps, config.early_stopping.patience
        if not 0 < every_steps * patience < total_steps:
            raise UserError(
                f"early_stopping.metric={stops!r} cannot end a run of {total_steps} steps: with "
                f"evaluators.{key}.every_steps={every_steps} it is computed too rarely for "
                f"early_stopping.patience={patience}; evaluate more often."
            )


def _evaluators(config: ConfigDict) -> dict[str, dict[str, Any]]:
    return {key: dict(section) for key, section in config.evaluators.items()}


def _check_labels(name: str, dataset: Dataset) -> None:
    """Raises UserError if the labels per image, one or several, do not fit the objective."""
    several = OBJECTIVES[name].several_labels
    if bool(dataset.element_spec["label"].shape) != several:
        has, hint = "one label", "a table with the column 'labels'"
        if not several:
            has, hint = "several labels", "objective.name='multi_label'"
        raise UserError(
            f"dataset.name={dataset.name!r} has {has} per image; objective.name={name!r} is for "
            f"{'several' if several else 'one'}; use {hint}."
        )


def _task(config: ConfigDict, dataset: Dataset) -> Task:
    def load_teacher(source: str) -> Any:
        from vit_jax.inference.load import load_teacher  # imports readers of many formats

        return load_teacher(
            "objective.teacher",
            source,
            image_shape=dataset.image_shape,
            class_names=dataset.class_names,
            dtype=config.model.dtype,
            preprocess=config.dataset.preprocess,
        )

    def load_tower(source: str) -> Any:
        from vit_jax.inference.load import load_tower

        return load_tower(
            "objective.image",
            source,
            image_shape=dataset.image_shape,
            dtype=config.model.dtype,
            preprocess=config.dataset.preprocess,
        )

    return Task(
        build_model=lambda num_outputs: create_model(**config.model, num_classes=num_outputs),
        image_shape=dataset.image_shape,
        class_names=dataset.class_names,
        load_teacher=load_teacher,
        load_tower=load_tower,
        eval_preprocess=config.dataset.eval_preprocess,
        read_labels=functools.partial(_read_labels, dataset.source),
    )


def _read_labels(source: Any) -> np.ndarray:
    """Labels of all examples, [N, ...]; reads all records unless a table has them."""
    columns = getattr(source, "columns", {})
    if "label" in columns:
        return columns["label"]
    logging.info("Reading %s for their labels.", counted(len(source), "example"))
    return np.array([source[i]["label"] for i in range(len(source))])


def _feature(
    objective: Any, image_shape: tuple[int, int, int], shapes: Any, name: str, key: str
) -> Callable[[Any, Any], jax.Array]:
    """(params, batch) -> [B, D], see `vector_feature`."""
    from vit_jax.models.features import vector_feature  # few runs need it

    model, prefix = objective.image_model or (objective.model, "")
    if prefix:
        shapes = {**shapes, **jax.eval_shape(lambda: objective.constants)}[prefix]
    return of_batches(vector_feature(model, name, image_shape, shapes, key), prefix=prefix)


def _standardize(
    config: ConfigDict, objective: Any, dataset: Dataset, shapes: Any, mesh: Mesh
) -> Callable[[Any], Any]:
    """Standardises the features of loaded parameters on the training data."""
    from vit_jax.evaluators.standardize import standardize  # few runs need these
    from vit_jax.evaluators.stream import Reader

    key, keys = "pretrained.standardize", config.pretrained
    if not keys.source or not keys.reset_head:
        raise UserError(
            f"{key}=True needs pretrained.source and pretrained.reset_head=True; to plan without "
            "weights, set it to False."
        )
    last_norm(shapes)
    feature_of = _feature(objective, dataset.image_shape, shapes, "pre_logits", key)
    reader = Reader(dataset, mesh, config.dataset.batch_size, dict(config.loader), ("image",))
    return functools.partial(standardize, feature_of=feature_of, reader=reader)


def _with_classes(class_names: tuple[str, ...], key: str, dataset: Dataset) -> Dataset:
    """Relabels data by class name if its classes are a subset or permutation of `class_names`."""
    if not class_names or dataset.class_names == class_names:
        return dataset
    from vit_jax.inference.class_order import match_classes, relabel  # imports class name lists

    hint = "classes of an evaluator must be among those of the training"
    try:
        outputs = match_classes(dataset.class_names, class_names, len(class_names), hint=hint)
    except UserError as error:
        raise as_user_error(f"evaluators.{key}: {error}", error) from error
    return relabel(dataset, outputs, len(class_names))


def _load_params(config: ConfigDict, shapes: Any, prefix: str, grid: tuple[int, int] | None) -> Any:
    from vit_jax.pretrained.load import load_pretrained  # imports readers of many formats

    keys = config.pretrained
    try:
        like = shapes[prefix] if prefix else shapes
        others = ("keep", "standardize")
        options = {key: value for key, value in keys.items() if key not in others}
        params, _ = load_pretrained(**options, like=like, target_grid=grid, model=config.model)
    except UserError as error:
        raise as_user_error(f"pretrained.source={keys.source!r}: {error}", error) from error
    return {**shapes, prefix: params} if prefix else params
