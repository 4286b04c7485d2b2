"""What recipes set, for tests that compare them with published tables."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict


def settings(config: ConfigDict) -> dict[str, Any]:
    """What recipes set, by name; whatever a recipe has beyond that is for the launch."""
    return {
        "split": config.dataset.split,
        "preprocess": config.dataset.preprocess,
        "eval_preprocess": config.dataset.eval_preprocess,
        "batch_size": config.dataset.batch_size,
        "epochs": config.duration.epochs,
        **{key: config.model[key] for key in ("dropout_rate", "representation_size")},
        **{key: config.model[key] for key in ("head_bias_init", "classifier")},
        "position_embedding": config.model.position_embedding,
        "stochastic_depth_rate": config.model.stochastic_depth_rate,
        "mixup_alpha": config.mix.mixup_alpha,
        **config.objective,
        **{key: config.optimizer[key] for key in ("learning_rate", "weight_decay", "clip_norm")},
        **{key: config.optimizer[key] for key in ("b1", "b2", "decay_parameters")},
        "momentum_dtype": config.optimizer.momentum_dtype,
        "optimizer": config.optimizer.name,
        "schedule": config.schedule.name,
        "warmup_steps": config.schedule.warmup_steps,
        "linear_end": config.schedule.linear_end,
        "splits": {key: evaluator.split for key, evaluator in config.evaluators.items()},
    }
