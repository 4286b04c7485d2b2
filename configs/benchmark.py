"""What `scripts/benchmark.py` measures unless told otherwise: Ti/16 at 224 pixels, batch 8.

    python scripts/benchmark.py step

Small enough for two CPU cores (about a second per update), and in proportion of images to
arithmetic like the models that people train.

`configs/benchmark.py:input` is that of `scripts/benchmark.py input`: the official training
preprocessing of batches of 128, of photographs that the benchmark makes itself.
"""

from ml_collections import ConfigDict

from vit_jax.config import get_config as default_config
from vit_jax.config import section
from vit_jax.errors import check_known
from vit_jax.models.variants import get_variant


def get_config(benchmark: str = "step") -> ConfigDict:
    config = default_config()
    check_known("benchmark", benchmark, ("step", "input"))
    if benchmark == "input":
        config.dataset.name = ""
        config.dataset.preprocess = "official_train(224)"
        config.dataset.batch_size = 128
        return config
    config.model = section("model", **get_variant("Ti/16"))
    config.dataset.name = "glyphs(size=224, num_examples=32)"
    config.dataset.preprocess = "decode"
    config.dataset.eval_preprocess = "decode"
    config.dataset.batch_size = 8
    config.optimizer.clip_norm = 1.0
    config.optimizer.weight_decay = 0.1
    config.loader.num_threads = 1
    return config
