"""What recipes set, for tests that compare them with published tables."""

from typing import Any

from ml_collections import ConfigDict

# What recipes for pre-training have in common; their tests say what differs.
PRETRAINING: dict[str, Any] = {
    "preprocess": "official_train(224)",
    "eval_preprocess": "big_vision_eval(224, resize=256)",
    "batch_size": 4096,
    "repeated_augmentation": 1,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "stochastic_depth_rate": 0.0,
    "classifier": "token",
    "position_embedding": "learned",
    "mixup_alpha": 0.0,
    "cutmix_alpha": 0.0,
    "probability": 1.0,  # of a mix, where there is one
    "cutmix_probability": 0.5,
    "per_example": False,
    "name": "classification",
    "loss": "sigmoid",
    "class_weights": "",
    "label_smoothing": 0.0,
    "optimizer": "adamw",
    "b1": 0.9,
    "b2": 0.999,
    "eps": 1e-8,
    "decay_parameters": "kernels",
    "decay_multipliers": (),
    "polyak_decay": 0.0,
    "schedule": "cosine",
    "warmup_steps": 10_000,
    "linear_end": 1e-5,
    "cooldown_steps": 0,
}


# Stand for what a kind of model or schedule has no key for, so that one table covers all kinds.
ABSENT: dict[str, Any] = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}
ABSENT |= {"stochastic_depth_rate": 0.0, "representation_size": None, "classifier": "token"}
ABSENT |= {"position_embedding": "learned", "linear_end": 1e-5}

MODEL = ("dropout_rate", "attention_dropout_rate", "stochastic_depth_rate", "representation_size")
MODEL += ("head_bias_init", "classifier", "position_embedding")
OPTIMIZER = ("weight_decay", "clip_norm", "b1", "b2", "eps", "decay_parameters", "momentum_dtype")
OPTIMIZER += ("decay_multipliers",)
SCHEDULE = ("learning_rate", "warmup_steps", "linear_end", "cooldown_steps")


def settings(config: ConfigDict) -> dict[str, Any]:
    """What recipes set, by name; whatever a recipe has beyond that is for the launch."""
    sections = ((config.model, MODEL), (config.optimizer, OPTIMIZER), (config.schedule, SCHEDULE))
    return {
        "split": config.dataset.split,
        "preprocess": config.dataset.preprocess,
        "eval_preprocess": config.dataset.eval_preprocess,
        "batch_size": config.dataset.batch_size,
        "repeated_augmentation": config.dataset.repeated_augmentation,
        "epochs": config.duration.epochs,
        **{
            key: section[key] if key in section else ABSENT[key]
            for section, keys in sections
            for key in keys
        },
        **config.mix,
        **config.objective,
        "polyak_decay": config.train_step.polyak_decay,
        "optimizer": config.optimizer.name,
        "schedule": config.schedule.name,
        "splits": {key: evaluator.split for key, evaluator in config.evaluators.items()},
    }
