"""What recipes set, for tests that compare them with published tables."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

# What no recipe for pre-training sets, except where its test says so.
UNTOUCHED: dict[str, Any] = {
    "cutmix_alpha": 0.0,
    "probability": 1.0,  # of a mix, where there is one
    "cutmix_probability": 0.5,
    "per_example": False,
    "repeated_augmentation": 1,
    "attention_dropout_rate": 0.0,
    "decay_multipliers": (),
    "eps": 1e-8,
    "cooldown_steps": 0,
    "polyak_decay": 0.0,
}


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
        "attention_dropout_rate": config.model.attention_dropout_rate,
        "repeated_augmentation": config.dataset.repeated_augmentation,
        **config.mix,
        **config.objective,
        **{key: config.optimizer[key] for key in ("learning_rate", "weight_decay", "clip_norm")},
        **{key: config.optimizer[key] for key in ("b1", "b2", "decay_parameters")},
        **{key: config.optimizer[key] for key in ("momentum_dtype", "decay_multipliers", "eps")},
        "polyak_decay": config.train_step.polyak_decay,
        "optimizer": config.optimizer.name,
        "schedule": config.schedule.name,
        "warmup_steps": config.schedule.warmup_steps,
        "linear_end": config.schedule.linear_end,
        "cooldown_steps": config.schedule.cooldown_steps,
        "splits": {key: evaluator.split for key, evaluator in config.evaluators.items()},
    }
