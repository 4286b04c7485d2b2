"""The defaults with an evaluator of each kind that measures features, as a recipe."""

from ml_collections import ConfigDict

from vit_jax import config as default
from vit_jax.evaluators.create import OF_FEATURES


def get_config() -> ConfigDict:
    config = default.get_config()
    with config.unlocked():
        for name in OF_FEATURES:
            config.evaluators[name] = default.evaluator(
                "test[:45]", name, train_split="train[:50]", batch_size=24
            )
        # With less, 50 images are separated almost without a limit: last places decide.
        config.evaluators.linear_probe.l2 = (1e-2, 1e-1)
    return config
