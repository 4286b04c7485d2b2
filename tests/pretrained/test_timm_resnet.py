"""BiT and RegNetY in both directions beside timm, and BiT's own files.

`SAME`: both sides compute the same function, timm's in float64; what differs is our rounding, at
most 2.3e-7 here. Another padding differs by 5e-4.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests import golden
from tests.peers import import_timm
from tests.pretrained import weights
from tests.pretrained.test_timm_parity import arrays_of, their_logits
from tests.pretrained.weights import difference, randomise
from vit_jax.errors import UserError
from vit_jax.files.paths import write_arrays, write_json
from vit_jax.inference.load import load_model, load_teacher
from vit_jax.models.create import VARIANTS
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.pretrained.formats import google, timm_others
from vit_jax.pretrained.formats.stored import WEIGHTS_FILE
from vit_jax.pretrained.formats.table import read_weights
from vit_jax.pretrained.infer import infer_model
from vit_jax.trees import flatten_names

timm = import_timm()

SAME = 2e-6
IMAGES = golden.images(2, 37, 50)  # every padding counts
KINDS = {"bit": timm_others.BITS, "regnet": timm_others.REGNETS}
NAMES = [name for known in KINDS.values() for name in known]


def their_bit(epsilon: float = 1e-8) -> Any:
    from timm.layers import StdConv2d

    return timm.models.resnetv2.ResNetV2(
        layers=[1, 1],
        channels=(256, 512),
        num_classes=5,
        stem_type="fixed",
        conv_layer=partial(StdConv2d, eps=epsilon),
    )


def their_regnet() -> Any:
    """Widths 24, 48, 96 and 192, and statistics that are not 0 and 1."""
    cfg = timm.models.regnet.RegNetCfg(w0=24, wa=24.0, wm=2.0, group_size=8, depth=6, se_ratio=0.25)
    model = timm.models.regnet.RegNet(cfg, num_classes=5)
    generator = torch.Generator().manual_seed(0)
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            z = torch.randn(value.shape, generator=generator)
            around = float(name.endswith(("bn.weight", "running_var")))
            value.copy_(z / value[0].numel() ** 0.5 if value.ndim > 1 else around + 0.1 * z)
    return model


def test_bit_of_timm(tmp_path: Path) -> None:
    model = their_bit()
    randomise(model)
    write_safetensors(tmp_path / "timm.safetensors", arrays_of(model), {})
    loaded = load_model(tmp_path / "timm.safetensors", image_size=IMAGES.shape[1:3])
    assert loaded.module.resnet_layers == (1, 1)
    theirs = their_logits(model, IMAGES)
    assert np.std(theirs) > 0.1
    assert difference(weights.logits(loaded.module, loaded.params, IMAGES), theirs) < SAME


def test_bit_of_its_own_files(tmp_path: Path) -> None:
    """timm reads the file that we write by BiT's names, with the epsilon of BiT's code."""
    module = weights.module_of("R50x1", resnet_layers=(1, 1), num_classes=5)
    params = weights.seeded(module, (32, 32, 3))
    # As small kernels as this see the epsilon.
    params |= {n: x * np.float32(1e-4) for n, x in params.items() if "block" in n and x.ndim == 4}
    path = write_arrays(tmp_path / "BiT.npz", google.to_big_transfer(params))
    loaded = load_model(path, image_size=IMAGES.shape[1:3])
    weights.assert_same(flatten_names(loaded.params), params)
    ours = weights.logits(loaded.module, loaded.params, IMAGES)
    for epsilon in (1e-10, 1e-8):
        model = their_bit(epsilon)
        model.load_pretrained(str(path))
        assert (difference(their_logits(model, IMAGES), ours) < SAME) == (epsilon == 1e-10)
    timms = loaded.module.clone(standardization_epsilon=1e-8)
    same = weights.logits(timms, loaded.params, IMAGES)
    assert difference(their_logits(model, IMAGES), same) < SAME


def test_regnet_of_timm_also_as_a_teacher(tmp_path: Path) -> None:
    model = their_regnet()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    inputs = {"input_size": [3, 32, 32], "crop_pct": 1.0, "mean": mean, "std": std}
    settings = {"architecture": "regnety_004", "global_pool": "avg", "pretrained_cfg": inputs}
    write_json(tmp_path / "config.json", settings)
    write_safetensors(tmp_path / WEIGHTS_FILE, arrays_of(model), {})
    loaded = load_model(tmp_path)
    assert loaded.module.stage_widths == (24, 48, 96, 192)
    theirs = their_logits(model, IMAGES)
    assert np.std(theirs) > 0.1
    assert difference(weights.logits(loaded.module, loaded.params, IMAGES), theirs) < SAME

    # A student's images are in [-1, 1]; its teacher was trained on ImageNet's mean and deviation.
    teacher = load_teacher(
        "objective.teacher",
        str(tmp_path),
        image_shape=IMAGES.shape[1:],
        class_names=[f"{i}" for i in range(5)],
        dtype="float32",
        preprocess="decode|inception_crop(37)|flip_lr",
    )
    scaled = (((IMAGES + 1.0) / 2.0 - mean) / std).astype(np.float32)
    ours = np.asarray(jax.jit(teacher.logits)(teacher.params, IMAGES))
    assert difference(ours, their_logits(model, scaled)) < SAME


@pytest.mark.parametrize("variant", ["R50x1", "RegNetY-400MF"])
def test_timm_creates_a_model_from_our_folder(variant: str, tmp_path: Path) -> None:
    """And what it has then are the bits of ours: each side reads what the other writes."""
    image = (64, 64, 3)
    module = weights.module_of(variant)
    params = weights.seeded(module, image)
    weights.write(tmp_path, "timm", module, params, image, VARIANTS[variant]["name"])
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    stored = read_weights(tmp_path / WEIGHTS_FILE, arrays_of(model))
    weights.assert_same(stored.params, params)
    if variant == "R50x1":
        with pytest.raises(UserError, match="timm has no BiT with .*R50x1, R50x3"):
            weights.write(tmp_path, "timm", weights.module_of("R50x2"), {}, image, "bit")


def shapes_of(architecture: str) -> dict[str, np.ndarray]:
    """Arrays that take no memory."""
    with weights.without_numbers():
        model = timm.create_model(architecture)
    state = model.state_dict()
    return {n: np.broadcast_to(np.float32(0), tuple(x.shape)) for n, x in state.items()}


@pytest.mark.parametrize("variant", NAMES)
def test_names_and_sizes_of_timms_models(variant: str) -> None:
    arrays = shapes_of(KINDS[VARIANTS[variant]["name"]][variant])
    stored = read_weights(Path("x.safetensors"), arrays)
    assert not stored.unexpected
    assert VARIANTS[variant].items() <= infer_model(stored.params, stored.kind, {}).items()


def test_other_regnets_are_refused_with_the_reason() -> None:
    for architecture, why in (
        ("regnetx_002", "no squeeze-and-excitation"),
        ("regnetz_040", "no projections"),
        ("regnety_040_sgn", "other norms"),
    ):
        with pytest.raises(UserError, match=f"this model has {why}.*not supported"):
            read_weights(Path("x.safetensors"), shapes_of(architecture))
