"""What `scripts/benchmark.py` measures unless told otherwise.

    python scripts/benchmark.py step --variant=S/16 --config.dataset.batch_size=8

`configs/benchmark.py:step` is Ti/16 at 224 pixels, batch 8: small enough for two CPU cores (a third
of a second per update), and in proportion of images to arithmetic like the models that people
train. Clipping and AdamW as in the paper's ImageNet training.

`configs/benchmark.py:tpu` is B/16 in bfloat16 with 64 images a chip of a v5e:2x2 and a first moment
in bfloat16.

`configs/benchmark.py:input` is that of `scripts/benchmark.py input`: the official training
preprocessing of batches of 128, of photographs that the benchmark makes itself.
"""

from ml_collections import ConfigDict

from vit_jax.config import get_config as default_config
from vit_jax.config import section
from vit_jax.errors import check_known
from vit_jax.models.variants import get_variant

BENCHMARKS = ("step", "tpu", "input")


def get_config(benchmark: str = "step") -> ConfigDict:
    config = default_config()
    check_known("benchmark", benchmark, BENCHMARKS)
    if benchmark == "input":
        config.dataset.name = ""
        config.dataset.preprocess = "official_train(224)"
        config.dataset.batch_size = 128
        return config
    config.model = section("model", **get_variant("Ti/16" if benchmark == "step" else "B/16"))
    config.dataset.name = "glyphs(size=224, num_examples=32)"
    config.dataset.preprocess = "decode"
    config.dataset.eval_preprocess = "decode"
    config.dataset.batch_size = 8
    config.duration.steps = 1000
    config.optimizer.clip_norm = 1.0
    config.optimizer.weight_decay = 0.1
    config.loader.num_threads = 1
    if benchmark == "tpu":
        config.model.dtype = "bfloat16"
        config.dataset.name = "imagenet2012"
        config.dataset.preprocess = "official_train(224)"
        config.dataset.eval_preprocess = "official_eval(224)"
        config.dataset.batch_size = 256
        config.optimizer.momentum_dtype = "bfloat16"
    return config
