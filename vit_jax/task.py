"""What a run learns from what: its data, and what its objective is built from."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.mixture import mix
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError, naming
from vit_jax.evaluators.create import OF_OUTPUTS, open_eval_data
from vit_jax.models import flexible
from vit_jax.models.create import MODELS, create_model, family_of
from vit_jax.models.description import Description, Values
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.objectives.objective import Objective, Task, of_batches
from vit_jax.wording import counted


def open_checked(**options: Any) -> Dataset:
    return create_dataset(**options).check()


def open_data(
    config: ConfigDict, open_dataset: Callable[..., Dataset]
) -> tuple[Dataset, dict[str, dict[str, Dataset]]]:
    """The data of the training and of each evaluator, with labels if the objective needs them."""
    name, data = config.objective.name, config.dataset
    kind = OBJECTIVES[name]
    options = {
        "name": data.name,
        "data_dir": data.data_dir,
        "split": data.split,
        "label_key": data.label_key,
        "preprocess": data.preprocess,
        "cache_gib": data.cache_gib,
        "on_bad_image": data.on_bad_image,
        "needs": kind.example_keys,
    }
    dataset = open_dataset(**options)
    if data.mixture:
        dataset = mix(dataset, _further(data.mixture, options, open_dataset))
    dataset = dataset.balanced(data.balance)
    dataset.check_keys(f"objective.name={name!r}", kind.example_keys)
    kind.check_labels(name, dataset)
    eval_data = open_eval_data(config.evaluators, data, open_dataset, dataset.image_shape, kind)
    for key, splits in eval_data.items():
        if config.evaluators[key].name in OF_OUTPUTS:
            for split in splits.values():
                kind.check_labels(name, split)
        if count := sum(map(splits[key].shared, getattr(dataset, "parts", (dataset,)))):
            seen = f"{counted(count, 'example')} of {splits[key].split!r}"
            logging.warning(f"evaluators.{key}: {seen} are in dataset.split={data.split!r} too.")
    return dataset, eval_data


def _further(
    rows: Any, options: dict[str, Any], open_dataset: Callable[..., Dataset]
) -> list[tuple[Dataset, float]]:
    """The sets of `dataset.mixture` and their weights."""
    further = []
    for row in rows:
        match row:
            case str(name), float() | int() as weight, *own if len(own) <= 2 and all(
                isinstance(text, str) for text in own
            ):
                given = zip(("preprocess", "split"), own, strict=False)
                changed = {key: value for key, value in given if value}
                with naming("dataset.mixture"):
                    dataset = open_dataset(**{**options, "name": name, **changed})
                further.append((dataset, float(weight)))
            case _:
                raise UserError(
                    f"dataset.mixture: {row!r} must be (name, weight), and if they are not those "
                    "of the other set, ops and a split."
                )
    return further


def create_task(config: ConfigDict, dataset: Dataset, total_steps: int) -> Task:
    seen = {
        "image_shape": dataset.image_shape,
        "dtype": config.model.dtype,
        "preprocess": config.dataset.preprocess,
    }

    def load_teacher(source: str) -> Any:
        from vit_jax.inference.load import load_teacher  # imports readers of many formats

        return load_teacher("objective.teacher", source, class_names=dataset.class_names, **seen)

    def load_tower(source: str, key: str) -> Any:
        from vit_jax.inference.load import load_tower

        return load_tower(key, source, **seen)

    def tokens_of(model: Any, **options: Any) -> Any:
        from vit_jax.models.views import tokens_function  # few runs need it

        return tokens_function(model, dataset.image_shape[:2], **options)

    return Task(
        build_model=lambda num_outputs: create_model(**config.model, num_classes=num_outputs),
        image_shape=dataset.image_shape,
        class_names=dataset.class_names,
        load_teacher=load_teacher,
        load_tower=load_tower,
        eval_preprocess=config.dataset.eval_preprocess,
        read_labels=dataset.labels,
        read_targets=lambda: dataset.targets(config.dataset.label_key),
        tokens_of=tokens_of,
        total_steps=total_steps,
    )


def at_patch_size(objective: Objective, image_size: tuple[int, int], patch_size: int) -> Objective:
    """The same objective with its model at another patch size, see `flexible.at_patch_size`.

    It takes the same parameters. UserError: see there; or an objective of patches.
    """
    if not objective.any_patch_size:
        raise UserError("this objective is of patches of one size.")
    other = copy.copy(objective)
    other.model, other.fit = flexible.at_patch_size(objective.model, image_size, patch_size)
    return other


def with_position_grid(config: ConfigDict) -> ConfigDict:
    """For images in shapes of their own the positions are those of a square, unless set."""
    op = parse(config.dataset.preprocess).patchify
    if op is None or not MODELS[config.model.name].any_shape or config.model.position_grid:
        return config
    config = copy.deepcopy(config)
    config.model.position_grid = op.square
    return config


def check_shapes(config: ConfigDict, objective: Objective, dataset: Dataset) -> None:
    """Raises UserError for images in shapes of their own that a part of the run cannot take."""
    op, name = dataset.preprocess.patchify, config.objective.name
    if op is None:
        return
    models = [model for model in objective.models.values() if family_of(model).input == "image"]
    flexible.check_any_shape(models[0])
    if not objective.any_shape:
        raise UserError(f"objective.name={name!r} is for images of one shape, without patchify.")
    if op.patch_size != models[0].patch_size:
        raise UserError(f"{op} must have model.patch_size={models[0].patch_size}.")
    for key in ("mix.mixup_alpha", "mix.cutmix_alpha", "train_step.patch_sizes"):
        section, _, field = key.partition(".")
        if value := config[section][field]:
            raise UserError(f"{key}={value} is for images of one shape, without patchify.")


def describe(config: ConfigDict, objective: Objective, dataset: Dataset) -> Description:
    """The description of the objective's model; UserError if the data do not fit its input."""
    model = objective.model
    taken = family_of(model).input
    if taken not in objective.example_keys:
        raise UserError(
            f"model.name={config.model.name!r} takes a {taken}, but objective.name="
            f"{config.objective.name!r} reads {', '.join(objective.example_keys)}."
        )
    vocab_size = getattr(model, "vocab_size", None)
    for op in dataset.preprocess.ops:  # of all sets of a mixture
        num_tokens = getattr(op, "num_tokens", 0) if op.columns else 0
        if vocab_size is not None and num_tokens > vocab_size:
            raise UserError(f"model.vocab_size={vocab_size} must be {num_tokens} for {op}.")
    sizes, size = config.train_step.patch_sizes, dataset.image_shape[:2]
    size = flexible.whole_patches(model, size) if sizes else size
    return Description(
        model={**config.model, "num_classes": objective.num_outputs},
        image_shape=dataset.element_spec[taken].shape if taken == "text" else dataset.image_shape,
        grid=None if taken == "text" else model.token_grid(size),
        class_names=objective.class_names,
        eval_preprocess=config.dataset.eval_preprocess,
        patch_size=sizes[0] if sizes else None,
        probabilities_by=objective.probabilities_by,
        values=Values(**objective.numbers) if objective.numbers else None,
    )


def feature_of(
    objective: Objective, image_shape: tuple[int, int, int], shapes: Any, name: str, key: str
) -> Callable[[Any, Any], jax.Array]:
    """(params, batch) -> [B, D], see `vector_feature`; of the first model that takes images.

    `shapes`: of all that the objective reads.
    """
    from vit_jax.models.features import vector_feature  # few runs need it

    images = {p: m for p, m in objective.models.items() if family_of(m).input == "image"}
    prefix, model = next(iter(images.items()))
    params, fit = shapes[prefix] if prefix else shapes, objective.fit
    if fit is None:
        return of_batches(vector_feature(model, name, image_shape, params, key), prefix=prefix)
    feature = vector_feature(model, name, image_shape, jax.eval_shape(fit, params), key)
    return of_batches(lambda params, images: feature(fit(params), images), prefix=prefix)


def with_classes(class_names: tuple[str, ...], key: str, dataset: Dataset) -> Dataset:
    """Relabels data by class name if its classes are a subset or permutation of `class_names`."""
    if not class_names or dataset.class_names == class_names:
        return dataset
    from vit_jax.inference.class_order import match_classes, relabel  # imports class name lists

    hint = "classes of an evaluator must be among those of the training"
    with naming(f"evaluators.{key}"):
        outputs = match_classes(dataset.class_names, class_names, len(class_names), hint=hint)
    return relabel(dataset, outputs, len(class_names))
