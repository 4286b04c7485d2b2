"""Evaluates the features of a model of any format: few-shot, linear probe, k-NN."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from vit_jax.errors import UserError
from vit_jax.evaluators.create import OF_FEATURES
from vit_jax.evaluators.frozen_features import Features, feature_step
from vit_jax.inference.load import load_model
from vit_jax.kinds import check_known
from vit_jax.models.features import vector_feature
from vit_jax.objectives.objective import of_batches
from vit_jax.wording import counted


def probe(
    source: str,
    *,
    dataset: str,
    train_split: str,
    split: str,
    kinds: Sequence[str] = tuple(OF_FEATURES),
    feature: str = "pre_logits",
    seeds: int = 3,
    num_neighbors: int = 20,
    data_dir: str = "",
    label_key: str = "",
    on_bad_image: str = "",
    batch_size: int = 128,
    **model_options: Any,
) -> dict[str, Any]:
    """Loads a model, computes a feature of two splits once, and evaluates it in several ways.

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      dataset, data_dir, label_key, on_bad_image: see `Model.open_dataset`.
      train_split: of the images to fit.
      split: of the images to evaluate.
      kinds: some of `OF_FEATURES`, with their defaults.
      feature: see `FrozenFeaturesEvaluator`.
      seeds: selections of images, for few_shot.
      num_neighbors: votes, for nearest_neighbors.
      batch_size: over all devices; rounded up to a multiple of their number.

    Returns the metrics as `KIND/METRIC`, `num_examples`, and what was evaluated on what; UserError
    if model and dataset do not match, or a file is missing or damaged.
    """
    if not kinds:
        raise UserError(f"--kinds is empty; choose from {', '.join(OF_FEATURES)}.")
    for kind in kinds:
        check_known("--kinds", kind, OF_FEATURES)
    model = load_model(source, **model_options)
    options = {"data_dir": data_dir, "label_key": label_key, "on_bad_image": on_bad_image}
    options["name"] = dataset
    data = [model.open_dataset(split=part, **options).check() for part in (split, train_split)]
    for part in data:
        logging.info(part.summary)
    if count := data[0].shared(data[1]):
        logging.warning(f"--split={split!r}: {counted(count, 'image')} are in {train_split!r} too.")
    readers = [model.reader(part, batch_size) for part in data]
    feature_of = vector_feature(model.module, feature, model.description.image_shape, model.params)
    features = Features(feature_step(of_batches(feature_of), model.mesh), *readers)
    own = {"few_shot": {"num_seeds": seeds}, "nearest_neighbors": {"num_neighbors": num_neighbors}}
    shared = {"train_split": train_split, "feature": feature}
    probes = {kind: OF_FEATURES[kind](features, **shared, **own.get(kind, {})) for kind in kinds}
    start = time.perf_counter()
    results: dict[str, Any] = {}
    for kind, evaluator in probes.items():
        metrics = evaluator(model.placed_params)
        results["num_examples"] = metrics.pop("num_examples")
        results |= {f"{kind}/{name}": value for name, value in metrics.items()}
    return {
        **results,
        "model": model.source,
        "format": model.format,
        "dataset": dataset,
        "split": split,
        **shared,
        "seeds": seeds,
        "num_neighbors": num_neighbors,
        **model_options,
        "preprocess": model.description.eval_preprocess,
        "seconds": time.perf_counter() - start,
    }


def table(results: dict[str, Any]) -> str:
    """The results as text."""
    count = counted(results["num_examples"], "example")
    lines = [
        f"{count} of {results['dataset']} {results['split']}, {results['feature']} fitted on "
        f"{results['train_split']}"
    ]
    for name, value in results.items():
        kind, _, metric = name.partition("/")
        if not metric.startswith("accuracy") or metric.endswith("_ci95"):
            continue
        interval = results.get(f"{name}_ci95")
        text = f"{kind} {metric.removeprefix('accuracy').strip('_')}".strip().replace("_", " ")
        spread = f" ± {interval:.2%}" if interval is not None else ""
        lines.append(f"{text:24}{value:9.2%}{spread}")
    return "\n".join(lines)
