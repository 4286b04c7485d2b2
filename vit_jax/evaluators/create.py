"""Evaluators by name, and those of a run, each with its data."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from jax.sharding import Mesh

from vit_jax.data.datasets import Dataset
from vit_jax.errors import UserError, naming
from vit_jax.evaluators.stream import Reader
from vit_jax.kinds import Kinds, check_known
from vit_jax.parameters.sharding import check_batch_size

# Each has `example_keys` and `metric_names`; called with parameters, it returns `{metric: float}`.
# These are built as `Kind(objective, reader, *, key=default, ...)`,
OF_OUTPUTS = Kinds(
    objective="vit_jax.evaluators.stream:ObjectiveEvaluator",
    classification="vit_jax.evaluators.classification:ClassificationEvaluator",
    average_precision="vit_jax.evaluators.classification:AveragePrecisionEvaluator",
    segmentation="vit_jax.evaluators.dense:SegmentationEvaluator",
    pixel_regression="vit_jax.evaluators.dense:PixelRegressionEvaluator",
    regression="vit_jax.evaluators.dense:RegressionEvaluator",
    zero_shot="vit_jax.evaluators.zero_shot:ZeroShotEvaluator",
    retrieval="vit_jax.evaluators.retrieval:RetrievalEvaluator",
)
# these as `Kind(features, *, key=default, ...)`, see frozen_features.py.
OF_FEATURES = Kinds(
    few_shot="vit_jax.evaluators.few_shot:FewShotEvaluator",
    linear_probe="vit_jax.evaluators.probes:LinearProbeEvaluator",
    nearest_neighbors="vit_jax.evaluators.probes:NearestNeighborsEvaluator",
)
EVALUATORS = OF_OUTPUTS | OF_FEATURES
# Keys of an evaluator that determine its data, besides `train_split`.
_DATA_KEYS = ("dataset", "data_dir", "split", "label_key", "preprocess")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatorKeys:
    """Keys of all evaluators.

    Args:
      split: split expression.
      dataset: name or path of its own data set; "" for the training's.
      data_dir: its directory; "" for dataset.data_dir.
      label_key: feature with its label; "" for dataset.label_key.
      preprocess: ops; "" for dataset.eval_preprocess.
      batch_size: 0 for dataset.batch_size.
      every_steps: steps between evaluations; 0: only after the last step.
      at_start: also evaluate before the first update.
    """

    split: str = "test"
    dataset: str = ""
    data_dir: str = ""
    label_key: str = ""
    preprocess: str = ""
    batch_size: int = 0
    every_steps: int = 0
    at_start: bool = False

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """These keys of a section of `config.evaluators`, and those of its kind."""
        names = {field.name for field in dataclasses.fields(cls)}
        shared = cls(**{key: value for key, value in section.items() if key in names})
        own = {key: value for key, value in section.items() if key not in (*names, "name")}
        return shared, own

    def data(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `create_dataset`; `config.dataset` has those that it does not set."""
        return {
            "name": self.dataset or training["name"],
            "data_dir": self.data_dir or training["data_dir"],
            "split": self.split,
            "cache_gib": training.get("cache_gib", 64.0),  # runs of before have none
            "label_key": self.label_key or ("" if self.dataset else training["label_key"]),
        }


def example_keys(kind: str, objective: Any) -> tuple[str, ...]:
    """Keys of an example that the evaluator needs; its data have labels if `label` is one."""
    return EVALUATORS[kind].example_keys or objective.example_keys


class Evaluation(NamedTuple):
    """An evaluator of a run."""

    evaluator: Any  # called with parameters and `on_batch`, returns `{metric: float}`
    datasets: Mapping[str, Dataset]  # that it reads
    every_steps: int
    at_start: bool

    def is_due(self, step: int, total_steps: int) -> bool:
        if step == 0:
            return self.at_start
        return step == total_steps or bool(self.every_steps and step % self.every_steps == 0)


def open_eval_data(
    sections: Mapping[str, Mapping[str, Any]],
    training: Mapping[str, Any],
    open_dataset: Callable[..., Dataset],
    image_shape: tuple[int, int, int],
    objective: Any,
) -> dict[str, dict[str, Dataset]]:
    """The data of each evaluator: its own, or else the training's.

    Evaluators on features read two splits: `KEY` and `KEY/train`.

    Args:
      sections, training: `config.evaluators` and `config.dataset`.
      open_dataset: `create_dataset`, or a replacement.
      image_shape: of training images, [H, W, C].
      objective: the training objective, or its class.

    UserError: see `create_dataset`; or examples with missing keys or another image shape.
    """
    opened: dict[str, dict[str, Dataset]] = {}
    for key, section in sections.items():
        keys, own = EvaluatorKeys.of(section)
        splits, needed = {key: keys.split}, example_keys(section["name"], objective)
        if section["name"] in OF_FEATURES:
            splits[f"{key}/train"] = own["train_split"]
        opened[key] = {}
        for name, split in splits.items():
            # The reader's message says dataset.split, but means the evaluator's.
            with naming(f"evaluators.{key} (split={split!r})"):
                dataset = open_dataset(
                    **{**keys.data(training), "split": split},
                    preprocess=keys.preprocess or training["eval_preprocess"],
                    on_bad_image=training["on_bad_image"],
                    needs=needed,
                )
                dataset.check_keys(section["name"], needed)
            if dataset.image_shape != image_shape and not dataset.preprocess.patchify:
                raise UserError(
                    f"evaluators.{key} reads images of {dataset.image_shape}, but training uses "
                    f"{image_shape}; make dataset.eval_preprocess="
                    f"{training['eval_preprocess']!r} produce the same size."
                )
            opened[key][name] = dataset
    return opened


def create_evaluations(
    sections: Mapping[str, Mapping[str, Any]],
    datasets: Mapping[str, Mapping[str, Dataset]],
    *,
    objective: Any,
    mesh: Mesh,
    batch_size: int,
    loader: Mapping[str, Any],
    feature_of: Callable[[str, str], Callable[..., Any]],
    with_classes: Callable[[str, Dataset], Dataset],
    on_wait: Callable[[], None] = lambda: None,
) -> dict[str, Evaluation]:
    """The evaluators of a run by their keys.

    Evaluators of one feature share a program, and if their data are the same, also the arrays.

    Args:
      sections, datasets: `config.evaluators`, and what `open_eval_data` returns.
      batch_size: for evaluators that do not set theirs.
      feature_of: (name, config key for errors) -> function of (params, batch), [B, D].
      with_classes: (key, dataset) -> the dataset with the training's classes as labels.
      on_wait: called before the host waits for a batch.

    Raises:
      UserError: classes that the training does not have, a feature that the model does not have, or
        a batch that is not divisible by the number of devices.
    """
    evaluations: dict[str, Evaluation] = {}
    steps: dict[str, Any] = {}  # by feature
    features: dict[Any, Any] = {}  # by feature and data
    for key, section in sections.items():
        shared, own = EvaluatorKeys.of(section)
        batch = shared.batch_size or batch_size
        check_batch_size(f"evaluators.{key}.batch_size", batch, mesh)
        needed = example_keys(section["name"], objective)
        read = functools.partial(
            Reader, mesh=mesh, batch_size=batch, loader=dict(loader), keys=needed, on_wait=on_wait
        )
        if section["name"] in OF_FEATURES:
            from vit_jax.evaluators.frozen_features import Features, feature_step  # few need it

            name = own["feature"]
            if name not in steps:
                steps[name] = feature_step(feature_of(name, f"evaluators.{key}.feature"), mesh)
            data = name, batch, own["train_split"], *(section[name] for name in _DATA_KEYS)
            if data not in features:
                features[data] = Features(steps[name], *map(read, datasets[key].values()))
            source: tuple[Any, ...] = (features[data],)
        else:
            source = objective, read(with_classes(key, datasets[key][key]))
        with naming(f"evaluators.{key}"):
            evaluator = EVALUATORS[section["name"]](*source, **own)
        evaluations[key] = Evaluation(evaluator, datasets[key], shared.every_steps, shared.at_start)
    return evaluations


def check_metrics(
    evaluations: Mapping[str, Evaluation],
    *,
    total_steps: int,
    best_metric: str,
    metric: str,
    patience: int,
    min_delta: float,
) -> None:
    """Raises UserError for a metric that is never computed, or too rarely to end the run early.

    `best_metric` is of `config.checkpoint`; `metric`, `patience`, `min_delta` of
    `config.early_stopping`.
    """
    del min_delta
    names = {key: evaluation.evaluator.metric_names for key, evaluation in evaluations.items()}
    known = [f"{key}/{name}" for key in names for name in names[key]]
    if best_metric:
        check_known("checkpoint.best_metric", best_metric, known)
    if not metric:
        return
    check_known("early_stopping.metric", metric, known)
    key = metric.rpartition("/")[0]
    every_steps = evaluations[key].every_steps
    if not 0 < every_steps * patience < total_steps:
        raise UserError(
            f"early_stopping.metric={metric!r} cannot end a run of {total_steps} steps: with "
            f"evaluators.{key}.every_steps={every_steps} it is computed too rarely for "
            f"early_stopping.patience={patience}; evaluate more often."
        )
    if not best_metric:
        logging.info(
            f"early_stopping.metric={metric!r} ends the run after its best step, which "
            f"checkpoint.best_metric={metric!r} would keep as WORKDIR/best."
        )
