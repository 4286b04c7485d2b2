"""A published checkpoint's whole life: load, fine-tune, evaluate, reload."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs import finetune
from tests import fixtures_data, tiny
from tests.pretrained import weights
from vit_jax.files.paths import write_arrays
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.load import load_model
from vit_jax.models.create import get_variant
from vit_jax.pretrained.formats import google
from vit_jax.train import train_and_evaluate

# Peak of resident memory while loading, over what Python and JAX take by themselves.
MEASURE = r"""
import re, sys, jax
import jax.numpy as jnp
from vit_jax.models.create import VARIANTS, create_model
from vit_jax.pretrained.load import load_pretrained
def peak():
    # Not getrusage: what it says includes the process that started this one.
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
jax.numpy.zeros(1).block_until_ready()
before = peak()
model = create_model(**VARIANTS["B/16"] | {"num_layers": 4}, num_classes=10)
image = jnp.zeros((1, 224, 224, 3))
like = jax.eval_shape(lambda: model.init(jax.random.key(0), image, train=False))["params"]
params, report = load_pretrained(sys.argv[1], like=like, kind="vit")
del like
arrays = [jax.device_put(leaf) for leaf in jax.tree.leaves(params) if hasattr(leaf, "nbytes")]
jax.block_until_ready(arrays)
print(peak() - before)
"""


def published(folder: Path, variant: str, **sizes: int) -> Path:
    """A file as those of ImageNet-21k: 21,843 classes, pre-logits, pre-Linen names."""
    width = get_variant(variant)["hidden_size"]
    module = weights.module_of(variant, num_classes=21_843, representation_size=width, **sizes)
    params = weights.seeded(module, (224, 224, 3), "r02")
    return write_arrays(folder / "published.npz", google.to_published(params))


@pytest.mark.slow
def test_fine_tuning_on_a_folder_of_images_at_a_rectangle(tmp_path: Path) -> None:
    source = published(tmp_path, "Ti/16", num_layers=2)  # instead of twelve
    photos = fixtures_data.write_folder(
        tmp_path / "photos", {"train": {"cat": 4, "dog": 4}, "test": {"cat": 3, "dog": 2}}
    )
    config = finetune.get_config(f"Ti/16,{photos}")
    config.pretrained.source = str(source)
    config.dataset.preprocess = "decode|inception_crop((256, 192))|flip_lr"
    config.dataset.eval_preprocess = "decode|resize(256, 192)"
    config.dataset.batch_size = 8
    config.evaluators.test.batch_size = 8
    config.duration.steps = 2  # the first moves nothing below a head of zeros
    config.schedule.warmup_steps = 0
    config.loader.num_threads = 1
    config.mesh.data, config.mesh.fsdp = 1, 8
    config.model.num_layers = 2
    config.log.tensorboard = False
    workdir = tmp_path / "run"
    results = train_and_evaluate(config, str(workdir))
    assert results["test/num_examples"] == 5

    # Its own result, loaded again: the head it learned, the same accuracy on the same images.
    model = load_model(workdir)
    assert model.description.class_names == ("cat", "dog")
    assert model.description.grid == (16, 12)
    assert not model.report["reset"]
    assert not model.report["adapted"]
    assert np.abs(model.params["head"]["kernel"]).max() > 0
    assert model.params["Transformer"]["posembed_input"]["pos_embedding"].shape == (1, 193, 192)
    again = evaluate(str(workdir), dataset=str(photos), split="test", batch_size=8)
    assert again["num_examples"] == 5
    assert again["accuracy"] == results["test/accuracy"]
    assert again["loss"] == pytest.approx(results["test/loss"], rel=1e-6)
    with np.load(source) as before:
        start = before["Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel"]
    end = model.params["Transformer"]["encoderblock_1"]["MlpBlock_0"]["Dense_0"]["kernel"]
    difference = np.abs(end - start).max()
    assert 0 < difference < 0.01 < np.abs(start).max()  # it went on from there
    described = json.loads((workdir / "model.json").read_text())
    assert described["model"]["representation_size"] is None


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_loading_takes_less_than_2_2_times_the_file(tmp_path: Path) -> None:
    """Of 186 MB: a third of the blocks of the real file."""
    base = published(tmp_path, "B/16", num_layers=4)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(base)],
        env=tiny.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    peak, size = int(result.stdout.split()[-1]), base.stat().st_size
    assert 0.9 * size < peak < 2.2 * size  # less than the file would mean that nothing was measured
