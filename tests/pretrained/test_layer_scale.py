"""DeiT III's weights, of timm and of Facebook, in both directions.

1e-5: both sides compute the same function, see test_timm_parity.py.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from tests import golden
from tests.peers import import_timm
from tests.pretrained import weights
from tests.pretrained.test_timm_parity import SAME, arrays_of, their_logits
from tests.pretrained.weights import difference, randomise
from vit_jax.inference.load import load_model
from vit_jax.models.features import feature_function
from vit_jax.parameters.table import abstract_params
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.pretrained.load import load_pretrained
from vit_jax.trees import flatten_names, unflatten_names

timm = import_timm()

TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64, "num_classes": 10}


def their_model(**kwargs: Any) -> Any:
    """Tiny, with branches as large as after training: at 1e-6 nobody would see a mistake."""
    model = timm.create_model("deit3_small_patch16_224", **{**TINY, **kwargs})
    randomise(model)
    with torch.no_grad():
        for block in model.blocks:
            block.ls1.gamma += 0.5
            block.ls2.gamma += 0.5
    return model


def test_deit_3_of_timm_and_of_facebook(tmp_path: Path) -> None:
    model, images = their_model(), golden.images(2, 64, 64)
    theirs = their_logits(model, images)
    write_safetensors(tmp_path / "timm.safetensors", arrays_of(model), {})
    # Facebook's own file: gammas beside the layers, below `model`.
    facebook = {
        name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value
        for name, value in model.state_dict().items()
    }
    assert "blocks.1.gamma_2" in facebook
    torch.save({"model": facebook}, tmp_path / "deit_3.pth")
    files = [tmp_path / "timm.safetensors", tmp_path / "deit_3.pth"]
    loaded = [load_model(path, num_heads=3) for path in files]
    weights.assert_same(*(flatten_names(each.params) for each in loaded))
    ours = loaded[0]
    assert ours.description.model["name"] == "modern_vit"
    assert ours.module.gelu == "exact"
    assert ours.params["posembed_patches"]["pos_embedding"].shape == (1, 16, 48)
    assert difference(weights.logits(ours.module, ours.params, images), theirs) < SAME
    # LayerScale is seen, and so is the GELU.
    flat = flatten_names(ours.params)
    without = {name: np.ones_like(x) if "gamma" in name else x for name, x in flat.items()}
    assert difference(weights.logits(ours.module, unflatten_names(without), images), theirs) > 1e-2

    folder = tmp_path / "folder"
    weights.write(folder, "timm", ours.module, flat, (64, 64, 3), "modern_vit")
    again = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert difference(their_logits(again, images), theirs) == 0.0


def test_positions_are_interpolated_without_a_row_for_the_class_token(tmp_path: Path) -> None:
    """As timm's, which resizes to the new image size when it loads."""
    model, images = their_model(), golden.images(1, 96, 96)
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
