"""timm computes our logits from our files, and we compute its logits from its files.

Of today's models see also test_timm_registry.py.

Tolerances (tests/data/golden's README and the notes there): 1e-5 where both sides compute the same
function, about four times the noise between JAX and PyTorch in float32; 1e-3 for timm as it comes,
which computes the exact GELU where Google's weights were trained with its tanh form; 5e-5 for a
shallow hybrid: timm adds 1e-8 to the variance of a kernel and 1e-5 to that of a group, the official
code (tests/models/test_golden.py) 1e-5 to the kernel's deviation and 1e-6.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests import golden
from tests.peers import import_timm
from tests.pretrained import weights
from tests.pretrained.weights import difference, randomise
from vit_jax.errors import UserError
from vit_jax.files.paths import write_arrays
from vit_jax.inference.load import load_model
from vit_jax.models.create import variant_of
from vit_jax.models.features import feature_function
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.pretrained.formats import google
from vit_jax.trees import flatten_names, unflatten_names

timm = import_timm()

PIXELS = 64
SAME, AS_IT_COMES = 1e-5, 1e-3
HYBRID = 5e-5
VARIANTS = {
    "Ti/16": {"img_size": PIXELS, "embed_dim": 192, "num_heads": 3},
    "S/32": {"img_size": PIXELS, "embed_dim": 384, "num_heads": 6, "patch_size": 32, "depth": 2},
}


def their_logits(model: Any, images: np.ndarray) -> np.ndarray:
    """In float64, so that the rounding that a tolerance allows for is ours alone."""
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        logits = model.eval().double()(pixels.double()).numpy()
    model.float()
    return logits


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_timm_reads_our_published_file_and_we_what_it_saves(variant: str, tmp_path: Path) -> None:
    recipe = "r02" if variant == "Ti/16" else "fanin"  # r02 sees the epsilon of the layer norms
    module = weights.module_of(variant, num_layers=VARIANTS[variant].get("depth", 12))
    params = weights.seeded(module, (PIXELS, PIXELS, 3), recipe)
    path = write_arrays(tmp_path / "published.npz", google.to_published(params))
    images = golden.images(1, PIXELS, PIXELS)
    tree = unflatten_names(params)
    tanh = weights.logits(module, tree, images)
    exact = weights.logits(module.clone(gelu="exact"), tree, images)
    model = timm.models.vision_transformer.VisionTransformer(
        num_classes=10, weight_init="skip", **VARIANTS[variant]
    )
    model.load_pretrained(str(path))
    for form, ours, other in (("tanh", tanh, exact), ("none", exact, tanh)):
        for block in model.blocks:
            block.mlp.act = torch.nn.GELU(approximate=form)
        theirs = their_logits(model, images)
        assert difference(theirs, ours) < SAME
        # The GELU is the cause of all that remains, and it is seen.
        assert 2 * SAME < difference(theirs, other) < AS_IT_COMES
    # What it saves of it is what we had.
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "timm.pth")
    loaded = load_model(tmp_path / "timm.pth", num_heads=module.num_heads)
    assert (loaded.format, loaded.module.gelu) == ("timm", "exact")
    weights.assert_same(flatten_names(loaded.params), params)


@pytest.mark.parametrize(("classifier", "pool"), [("gap", "avg"), ("map", "map")])
def test_timm_reads_our_big_vision_file(classifier: str, pool: str, tmp_path: Path) -> None:
    images = golden.images(2, PIXELS, PIXELS)
    module = weights.module_of("Ti/16", classifier=classifier, num_layers=2)
    params = weights.seeded(module, (PIXELS, PIXELS, 3))
    path = write_arrays(tmp_path / "a.npz", google.to_big_vision(params))
    options = {"global_pool": pool, "class_token": False, "fc_norm": False, "depth": 2}
    model = timm.models.vision_transformer.VisionTransformer(
        num_classes=10, act_layer="gelu_tanh", **options, **VARIANTS["Ti/16"]
    )
    model.load_pretrained(str(path))
    ours = weights.logits(module, unflatten_names(params), images)
    assert difference(their_logits(model, images), ours) < SAME


def test_hybrids(tmp_path: Path) -> None:
    """Two of its stages, of one block and of two."""
    module = weights.module_of("R26+S/32", resnet_layers=(1, 2), num_layers=2)
    params = weights.seeded(module, (PIXELS, PIXELS, 3))
    path = write_arrays(tmp_path / "published.npz", google.to_published(params))
    images = golden.images(1, PIXELS, PIXELS)
    ours = weights.logits(module, unflatten_names(params), images)
    hybrid = timm.models.vision_transformer_hybrid
    model = hybrid._create_vision_transformer_hybrid(
        "vit_small_r26_s32_224",
        hybrid._resnetv2((1, 2)),
        num_classes=10,
        act_layer="gelu_tanh",
        img_size=PIXELS,
        embed_dim=384,
        depth=2,
        num_heads=6,
    )
    model.load_pretrained(str(path))
    assert difference(their_logits(model, images), ours) < HYBRID
    # What timm saves of it, read by us, is what we had.
    write_safetensors(tmp_path / "timm.safetensors", arrays_of(model), {})
    loaded = load_model(tmp_path / "timm.safetensors", num_heads=6)
    assert loaded.description.model["resnet_layers"] == module.resnet_layers
    weights.assert_same(flatten_names(loaded.params), params)

    # A stem without stages, by names and shapes.
    module = weights.module_of("R+Ti/16")
    params = weights.seeded(module, (PIXELS, PIXELS, 3))
    path = write_arrays(tmp_path / "stem.npz", google.to_published(params))
    model = timm.create_model("vit_tiny_r_s16_p8_224", num_classes=10, img_size=PIXELS)
    model.load_pretrained(str(path))
    write_safetensors(tmp_path / "stem.safetensors", arrays_of(model), {})
    weights.assert_same(flatten_names(load_model(tmp_path / "stem.safetensors").params), params)


MIXERS = {
    "mixer_s32_224": "Mixer-S/32",
    "resmlp_12_224": "ResMLP-S12/16",
    "gmixer_12_224": "gMixer-12/16",
}


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_in_both_directions(name: str, tmp_path: Path) -> None:
    """Each side computes what the other wrote, also of images that are no square."""
    image = (64, 96, 3)
    images = golden.images(2, *image[:2])
    model = timm.create_model(name, num_classes=10, img_size=image[:2])
    randomise(model)
    with torch.no_grad():
        for key, array in model.named_parameters():
            array += 0.3 * key.endswith((".ls1", ".ls2"))  # branches as large as after training
    theirs = their_logits(model, images)
    write_safetensors(tmp_path / "timm.safetensors", arrays_of(model), {})
    patch = 32 if "32" in MIXERS[name] else 16
    loaded = load_model(tmp_path / "timm.safetensors", grid=(64 // patch, 96 // patch))
    assert variant_of(loaded.description.model) == MIXERS[name]
    assert loaded.description.image_shape == image
    assert difference(weights.logits(loaded.module, loaded.params, images), theirs) < SAME
    folder, flat = tmp_path / "folder", flatten_names(loaded.params)
    weights.write(folder, "timm", loaded.module, flat, image, "mixer")
    again = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert difference(their_logits(again, images), theirs) == 0.0
    other = loaded.module.clone(patch_size=8)
    with pytest.raises(UserError, match="timm has no Mixer with .*patch_size=8"):
        weights.write(folder, "timm", other, {}, image, name="mixer")


def test_intermediate_layers_are_those_of_timm(tmp_path: Path) -> None:
    """DINOv2 with registers: patches and class token of every block, through the last norm."""
    sizes = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64, "patch_size": 8}
    model = timm.create_model("vit_small_patch14_reg4_dinov2", num_classes=0, **sizes)
    randomise(model)
    images = golden.images(2, 64, 64)
    write_safetensors(tmp_path / "dinov2.safetensors", arrays_of(model), {})
    ours = load_model(tmp_path / "dinov2.safetensors", num_heads=3)
    names = ["block_0_normed", "block_1_normed", "tokens", "register_3"]
    features = jax.jit(feature_function(ours.module, names))(ours.params, images)
    pixels, model = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), model.eval()
    with torch.no_grad():
        layers = model.get_intermediate_layers(pixels, n=2, return_prefix_tokens=True, norm=True)
        last = model.forward_features(pixels).numpy()
    for i, (patches, prefix) in enumerate(layers):
        theirs = np.concatenate([prefix.numpy(), patches.numpy()], axis=1)
        assert difference(features[f"block_{i}_normed"], theirs) < SAME
    assert difference(features["tokens"], last) < SAME
    assert difference(features["register_3"], last[:, 4]) < SAME


OTHER_SIZES = [  # positions before all tokens, of patches alone, BEiT's of offsets
    ("vit_tiny_patch16_224", (48, 80)),
    ("vit_small_patch14_reg4_dinov2", (28, 56)),
    ("vit_base_patch16_siglip_224", (48, 48)),
    ("beit_base_patch16_224", (80, 80)),
    ("beit_base_patch16_224", (32, 48)),
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, for timm
@pytest.mark.parametrize(("architecture", "size"), OTHER_SIZES)
def test_other_sizes_as_timm_loads_them(architecture, size, tmp_path):
    """The folder of a model of 4 x 4 tokens, for images of another size: no method is named."""
    args: dict[str, Any] = {"depth": 1, "embed_dim": 48, "num_heads": 3, "num_classes": 5}
    side = 4 * (14 if "patch14" in architecture else 16)
    model = timm.create_model(architecture, **args, img_size=side)
    randomise(model)
    config = {"architecture": architecture, "model_args": {**args, "img_size": side}}
    config["global_pool"] = model.global_pool
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", arrays_of(model), {"format": "pt"})
    larger = timm.create_model(architecture, **args, img_size=size).eval()
    module = sys.modules[type(model).__module__]
    larger.load_state_dict(module.checkpoint_filter_fn(model.state_dict(), larger))
    images = golden.images(2, *size)
    loaded = load_model(tmp_path, image_size=size)
    ours = loaded.module.apply({"params": loaded.params}, images, train=False)
    assert difference(their_logits(larger, images), ours) < SAME
