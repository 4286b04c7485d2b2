"""timm computes our logits from our files, and we compute its logits from its files.

Of today's models see also test_timm_registry.py.

Tolerances (tests/data/golden's README and the notes there): 1e-5 where both sides compute the same
function, about four times the noise between JAX and PyTorch in float32; 1e-3 for timm as it comes,
which computes the exact GELU where Google's weights were trained with its tanh form; 5e-6 for a
shallow hybrid whose constants are matched, 5e-5 unmatched: timm adds 1e-8 to the variance of a
kernel and 1e-5 to that of a group, the official code 1e-5 to the kernel's deviation and 1e-6.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional

from tests import golden
from tests.peers import import_timm
from tests.pretrained import weights
from tests.pretrained.weights import difference, randomise
from vit_jax.errors import UserError
from vit_jax.files.paths import write_arrays, write_json
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model, variant_of
from vit_jax.models.features import feature_function
from vit_jax.parameters.table import abstract_params
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.pretrained.formats import google
from vit_jax.pretrained.formats.names import write_table
from vit_jax.pretrained.formats.table import read_weights
from vit_jax.pretrained.formats.timm import vit_table
from vit_jax.pretrained.load import _add_entry, load_pretrained
from vit_jax.pretrained.zoo.entries import get_entry
from vit_jax.trees import flatten_names, unflatten_names

timm = import_timm()

PIXELS = 64
SAME, AS_IT_COMES = 1e-5, 1e-3
HYBRID, HYBRID_AS_IT_COMES = 5e-6, 5e-5
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


def save_published(folder: Path, params: dict[str, np.ndarray]) -> Path:
    return write_arrays(folder / "published.npz", google.to_published(params))


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_timm_reads_our_published_file_and_we_what_it_saves(variant: str, tmp_path: Path) -> None:
    recipe = "r02" if variant == "Ti/16" else "fanin"  # r02 sees the epsilon of the layer norms
    module = weights.module_of(variant, num_layers=VARIANTS[variant].get("depth", 12))
    params = weights.seeded(module, (PIXELS, PIXELS, 3), recipe)
    path = save_published(tmp_path, params)
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


def test_timm_reads_our_big_vision_file(tmp_path: Path) -> None:
    images = golden.images(2, PIXELS, PIXELS)
    for classifier, pool in (("gap", "avg"), ("map", "map")):
        module = weights.module_of("Ti/16", classifier=classifier, num_layers=2)
        params = weights.seeded(module, (PIXELS, PIXELS, 3))
        path = write_arrays(tmp_path / f"{classifier}.npz", google.to_big_vision(params))
        model = timm.models.vision_transformer.VisionTransformer(
            num_classes=10,
            act_layer="gelu_tanh",
            global_pool=pool,
            class_token=False,
            fc_norm=False,
            depth=2,
            **VARIANTS["Ti/16"],
        )
        model.load_pretrained(str(path))
        ours = weights.logits(module, unflatten_names(params), images)
        assert difference(their_logits(model, images), ours) < SAME


def test_timm_creates_a_model_from_our_folder(tmp_path: Path) -> None:
    """`timm.create_model("local-dir:...")` with nothing but the folder; rectangles included."""
    images = golden.images(2, 64, 96)
    for classifier, gelu in (("token", "tanh"), ("gap", "exact"), ("map", "tanh")):
        module = weights.module_of("Ti/16", classifier=classifier, gelu=gelu, num_layers=2)
        params = weights.seeded(module, (64, 96, 3))
        folder = tmp_path / classifier
        weights.write(folder, "timm", module, params, (64, 96, 3))
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
        ours = weights.logits(module, unflatten_names(params), images)
        assert difference(their_logits(model, images), ours) < SAME


def matched(module: Any) -> None:
    """timm's hybrid with the official code's two constants."""
    for child in module.modules():
        if isinstance(child, timm.layers.GroupNormAct):
            child.eps = 1e-6
        if isinstance(child, timm.layers.StdConv2dSame):
            child.forward = _official_std_conv.__get__(child)


def _official_std_conv(self: Any, x: torch.Tensor) -> torch.Tensor:
    axes = (1, 2, 3)
    weight = self.weight - self.weight.mean(axes, keepdim=True)
    weight = weight / (weight.std(axes, keepdim=True, unbiased=False) + 1e-5)
    if self.same_pad:
        x = timm.layers.padding.pad_same(x, self.kernel_size, self.stride, self.dilation)
    padding = 0 if self.same_pad else self.padding
    return functional.conv2d(x, weight, None, self.stride, padding, self.dilation, self.groups)


def test_hybrids(tmp_path: Path) -> None:
    """Two of its stages, of one block and of two."""
    module = weights.module_of("R26+S/32", resnet_layers=(1, 2), num_layers=2)
    params = weights.seeded(module, (PIXELS, PIXELS, 3))
    path = save_published(tmp_path, params)
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
    as_it_comes = difference(their_logits(model, images), ours)
    matched(model)
    assert difference(their_logits(model, images), ours) < HYBRID
    assert 2 * HYBRID < as_it_comes < HYBRID_AS_IT_COMES  # the kernels' constant is seen
    # Faint images are the ones that see the group norm's epsilon.
    faint = (1e-3 * images).astype(np.float32)
    ours = weights.logits(module, unflatten_names(params), faint)
    assert difference(their_logits(model, faint), ours) < HYBRID

    # What timm saves of it, read by us, is what we had.
    write_safetensors(tmp_path / "timm.safetensors", arrays_of(model), {})
    loaded = load_model(tmp_path / "timm.safetensors", num_heads=6)
    assert loaded.description.model["resnet_layers"] == module.resnet_layers
    weights.assert_same(flatten_names(loaded.params), params)


def test_stem_hybrid_by_names_and_shapes(tmp_path: Path) -> None:
    module = weights.module_of("R+Ti/16")
    params = weights.seeded(module, (PIXELS, PIXELS, 3))
    model = timm.create_model("vit_tiny_r_s16_p8_224", num_classes=10, img_size=PIXELS)
    model.load_pretrained(str(save_published(tmp_path, params)))
    write_safetensors(tmp_path / "timm.safetensors", arrays_of(model), {})
    weights.assert_same(flatten_names(load_model(tmp_path / "timm.safetensors").params), params)


@pytest.mark.parametrize(
    ("variant", "name"), [("L/16", "vit_large_patch16_224"), ("R50+B/16", "vit_base_r50_s16_224")]
)
def test_large_by_names_and_shapes(variant: str, name: str) -> None:
    """They are too large to run here; their names and shapes are the ones of timm's models."""
    module = weights.module_of(variant, num_classes=1000)
    shapes = flatten_names(golden.abstract_params(module))
    params = {name: np.broadcast_to(np.float32(0), leaf.shape) for name, leaf in shapes.items()}
    ours = write_table(vit_table(stem="stem."), params, "timm")
    with weights.without_numbers():
        model = timm.create_model(name, num_classes=1000)
    theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert {name: array.shape for name, array in ours.items()} == theirs


def test_mixer_in_both_directions(tmp_path: Path) -> None:
    """Each side computes what the other wrote, also of images that are no square."""
    image = (64, 96, 3)
    images = golden.images(2, *image[:2])
    module = weights.module_of("Mixer-S/32", gelu="exact", channels_mlp_dim=1001)
    params = weights.seeded(module, image)
    weights.write(tmp_path / "ours", "timm", module, params, image, name="mixer")
    model = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True)
    ours = weights.logits(module, unflatten_names(params), images)
    assert difference(their_logits(model, images), ours) < SAME

    randomise(model)
    write_safetensors(tmp_path / "timm.safetensors", arrays_of(model), {})
    loaded = load_model(tmp_path / "timm.safetensors", grid=(2, 3))
    assert loaded.module == module
    assert loaded.description.image_shape == image
    theirs = their_logits(model, images)
    assert difference(weights.logits(module, loaded.params, images), theirs) < SAME
    tanh = module.clone(gelu="tanh")
    assert difference(weights.logits(tanh, loaded.params, images), theirs) > 2 * SAME
    huge = weights.module_of("Mixer-H/14")
    with pytest.raises(UserError, match="timm has no Mixer with .*patch_size=14"):
        weights.write(tmp_path / "h", "timm", huge, {}, (28, 28, 3), name="mixer")


@pytest.mark.parametrize("name", ["resmlp_12_224", "gmixer_12_224"])
def test_resmlp_and_gmixer_in_both_directions(name: str, tmp_path: Path) -> None:
    images = golden.images(2, 64, 96)
    model = timm.create_model(name, num_classes=10, img_size=(64, 96))
    randomise(model)
    with torch.no_grad():
        for key, array in model.named_parameters():
            array += 0.3 * key.endswith((".ls1", ".ls2"))  # branches as large as after training
    theirs = their_logits(model, images)
    write_safetensors(tmp_path / "timm.safetensors", arrays_of(model), {})
    loaded = load_model(tmp_path / "timm.safetensors", grid=(4, 6))
    assert (
        variant_of(loaded.description.model) == {"r": "ResMLP-S12/16", "g": "gMixer-12/16"}[name[0]]
    )
    assert difference(weights.logits(loaded.module, loaded.params, images), theirs) < SAME
    folder = tmp_path / "folder"
    weights.write(folder, "timm", loaded.module, flatten_names(loaded.params), (64, 96, 3), "mixer")
    again = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert difference(their_logits(again, images), theirs) == 0.0
    wider = loaded.module.clone(channels_mlp_dim=7)
    with pytest.raises(UserError, match="timm has no Mixer with .*_mlp_dim=7"):
        weights.write(folder, "timm", wider, {}, (64, 96, 3), name="mixer")


@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch14_reg4_dinov2.lvd142m",
        "vit_small_patch16_dinov3.lvd1689m",
        "eva02_tiny_patch14_336.mim_in22k_ft_in1k",
        "vit_base_patch16_clip_224.laion2b",
        "vit_wee_patch16_reg1_gap_256.sbb_in1k",
        "resmlp_12_224.fb_in1k",
    ],
)
def test_the_zoo_says_of_timms_models_what_they_are(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without values: names, shapes, and the config.json of timm's hub."""
    config = timm.models.get_pretrained_cfg(name)
    with weights.without_numbers():
        model = timm.create_model(name.partition(".")[0], num_classes=config.num_classes)
    zero = np.float32(0)
    arrays = {key: np.broadcast_to(zero, x.shape) for key, x in model.state_dict().items()}
    told = {"architecture": config.architecture, "global_pool": model.global_pool}
    write_json(tmp_path / "config.json", told | {"input_size": [3, 224, 224]})
    stored = read_weights(tmp_path / "model.safetensors", arrays)
    _add_entry(stored, get_entry(name))  # raises UserError for another model
    assert not caplog.messages


TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64, "num_classes": 10}


def test_positions_are_interpolated_without_a_row_for_the_class_token(tmp_path: Path) -> None:
    """As timm's, which resizes to the new image size when it loads."""
    model, images = timm.create_model("deit3_small_patch16_224", **TINY), golden.images(1, 96, 96)
    randomise(model)
    torch.save(model.state_dict(), tmp_path / "a.pth")
    larger = timm.create_model("deit3_small_patch16_224", **{**TINY, "img_size": 96})
    larger.load_state_dict(
        timm.models.vision_transformer.checkpoint_filter_fn(model.state_dict(), larger)
    )
    module = load_model(tmp_path / "a.pth", num_heads=3).module
    like = abstract_params(module, (96, 96, 3))
    params, report = load_pretrained(
        tmp_path / "a.pth", like=like, kind="modern_vit", reset_head=False, posemb="bicubic"
    )
    name = "posembed_patches/pos_embedding"
    assert report["adapted"] == {name: "bicubic 4x4 -> 6x6"}
    ours = weights.logits(module, params, images)
    assert difference(ours, their_logits(larger, images)) < SAME


def test_intermediate_layers_are_those_of_timm(tmp_path: Path) -> None:
    """DINOv2 with registers: patches and class token of every block, through the last norm."""
    model = timm.create_model(
        "vit_small_patch14_reg4_dinov2", **TINY | {"num_classes": 0}, patch_size=8
    )
    randomise(model)
    images = golden.images(2, 64, 64)
    write_safetensors(tmp_path / "dinov2.safetensors", arrays_of(model), {})
    ours = load_model(tmp_path / "dinov2.safetensors", num_heads=3)
    names = ["block_0_normed", "block_1_normed", "tokens", "register_3"]
    found = jax.jit(feature_function(ours.module, names))(ours.params, images)
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).double()
    with torch.no_grad():
        layers = (
            model.eval()
            .double()
            .get_intermediate_layers(pixels, n=2, return_prefix_tokens=True, norm=True)
        )
        last = model.forward_features(pixels).numpy()
    for i, (patches, prefix) in enumerate(layers):
        theirs = np.concatenate([prefix.numpy(), patches.numpy()], axis=1)
        assert difference(found[f"block_{i}_normed"], theirs) < SAME
    assert difference(found["tokens"], last) < SAME
    assert difference(found["register_3"], last[:, 4]) < SAME


def test_a_pooling_of_other_sizes_than_the_blocks_is_written_as_evas(tmp_path: Path) -> None:
    """timm's VisionTransformer has none; Eva needs no rotary positions."""
    sizes = {**weights.SMALL, "name": "modern_vit", "gelu": "exact", "classifier": "map"}
    module = create_model(**sizes, map_mlp_dim=32, class_token=False, num_classes=5)
    params, images = weights.seeded(module, (32, 32, 3)), golden.images(2, 32, 32)
    weights.write(tmp_path, "timm", module, params, (32, 32, 3), "modern_vit")
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert type(model).__name__ == "Eva"
    ours = weights.logits(module, unflatten_names(params), images)
    assert difference(their_logits(model, images), ours) < SAME
