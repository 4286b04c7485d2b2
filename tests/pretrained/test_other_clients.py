"""Files of open_clip, OpenAI, Facebook and transformers' Flax models.

Their code is not installed: files are made from models of transformers and timm, renamed as the
projects name them. 1e-5: see test_huggingface_classes.py.
"""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import flax
import numpy as np
import pytest
import torch
from flax.traverse_util import unflatten_dict

from tests import golden
from tests.peers import import_timm, import_transformers
from tests.pretrained import weights
from tests.pretrained.test_huggingface_classes import SAME, SIZES, TOWERS, spread
from tests.pretrained.test_timm_parity import their_logits
from vit_jax.errors import UserError
from vit_jax.inference.load import load_model
from vit_jax.trees import flatten_names

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
WIDE = SIZES | {"hidden_size": 128, "num_attention_heads": 2}  # heads of width 64, as CLIP's


def clip_of(**config: Any) -> Any:
    transformers = import_transformers()
    model = transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(**WIDE, projection_dim=10, **config)
    )
    spread(model)
    return model.eval()


def openai_names(model: Any) -> dict[str, torch.Tensor]:
    """The tower under `visual.`, as in openai/CLIP `model.py` and open_clip `transformer.py`."""
    tower = {n.removeprefix("vision_model."): x for n, x in model.state_dict().items()}
    visual = {
        "conv1.weight": tower["embeddings.patch_embedding.weight"],
        "class_embedding": tower["embeddings.class_embedding"],
        "positional_embedding": tower["embeddings.position_embedding.weight"],
        "proj": tower["visual_projection.weight"].T.contiguous(),
    }
    for part in ("weight", "bias"):
        visual[f"ln_pre.{part}"] = tower[f"pre_layrnorm.{part}"]
        visual[f"ln_post.{part}"] = tower[f"post_layernorm.{part}"]
        for i in range(2):
            theirs, block = f"encoder.layers.{i}.", f"transformer.resblocks.{i}."
            qkv = [tower[f"{theirs}self_attn.{name}_proj.{part}"] for name in "qkv"]
            visual[f"{block}attn.in_proj_{part}"] = torch.cat(qkv)
            for ours, name in {
                "attn.out_proj": "self_attn.out_proj",
                "ln_1": "layer_norm1",
                "ln_2": "layer_norm2",
                "mlp.c_fc": "mlp.fc1",
                "mlp.c_proj": "mlp.fc2",
            }.items():
                visual[f"{block}{ours}.{part}"] = tower[f"{theirs}{name}.{part}"]
    text = {"logit_scale": torch.zeros(()), "transformer.resblocks.0.ln_1.bias": torch.zeros(3)}
    return {**{f"visual.{name}": x for name, x in visual.items()}, **text}


def embedding(model: Any, images: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        return model(pixel_values=pixels).image_embeds.numpy()


def assert_computes(loaded: Any, theirs: np.ndarray, images: np.ndarray) -> None:
    ours = weights.logits(loaded.module, loaded.params, images)
    assert np.abs(ours - theirs).max() < SAME * np.abs(theirs).max()


def test_openai_and_open_clip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = golden.images(2, 32, 32)
    quick, exact = clip_of(), clip_of(hidden_act="gelu")
    torch.save(openai_names(quick), tmp_path / "ViT.pt")
    with caplog.at_level(logging.WARNING):
        loaded = load_model(tmp_path / "ViT.pt")
    assert "guessed: num_heads=2, gelu=quick, layer_norm_epsilon=1e-05" in caplog.text
    assert loaded.report["dropped"]["logit_scale"] == "not of a tower"
    assert_computes(loaded, embedding(quick, images), images)

    # open_clip's folder, whose configuration says that the GELU is the exact one.
    folder = tmp_path / "hub"
    folder.mkdir()
    torch.save(openai_names(exact), folder / "open_clip_pytorch_model.bin")
    tower = {"image_size": 32, "layers": 2, "width": 128, "patch_size": 8, "head_width": 64}
    config: dict[str, Any] = {
        "model_cfg": {"embed_dim": 10, "vision_cfg": tower, "text_cfg": {}},
        "preprocess_cfg": {"mean": [0.4, 0.5, 0.6], "std": [0.3, 0.2, 0.1]},
    }
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    loaded = load_model(folder)
    assert loaded.module.gelu == "exact"
    assert loaded.description.probabilities_by == "none"
    assert loaded.description.eval_preprocess == (
        "decode|resize_small(32, 'pillow_bicubic', 'down')|central_crop(32, 32, 'nearest')"
        "|normalize((0.4, 0.5, 0.6), (0.3, 0.2, 0.1))"
    )
    assert_computes(loaded, embedding(exact, images), images)
    for changes, expected in (
        ({"interpolation": "bilinear"}, "resize_small(32, 'pillow_bilinear', 'down')|central_crop"),
        ({"interpolation": "random"}, "resize_small(32, 'pillow_bicubic', 'down')|central_crop"),
        ({"resize_mode": "squash"}, "resize(32, 32, 'pillow_bicubic')|normalize((0.4, 0.5, 0.6)"),
        ({"resize_mode": "longest"}, "resize(32, 32, 'pillow_bicubic')|normalize((0.4, 0.5, 0.6)"),
    ):
        changed = {**config, "preprocess_cfg": {**config["preprocess_cfg"], **changes}}
        (folder / "open_clip_config.json").write_text(json.dumps(changed))
        assert f"decode|{expected}" in load_model(folder).description.eval_preprocess
    assert "the whole image resized to 32x32 for size={'longest': 32}" in caplog.text
    tower["attentional_pool"] = True
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"vision_cfg\.attentional_pool=True is not supported"):
        load_model(folder)


def test_a_tower_of_timm_in_open_clip(tmp_path: Path) -> None:
    timm = import_timm()
    model = timm.create_model("vit_base_patch16_siglip_224", num_classes=0, **SMALL).eval()
    spread(model)
    state = {f"visual.trunk.{name}": x for name, x in model.state_dict().items()}
    torch.save({**state, "text.a": torch.zeros(3)}, tmp_path / "open_clip_pytorch_model.bin")
    cfg = {"vision_cfg": {"timm_model_name": "vit_base_patch16_siglip_224", "image_size": 32}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": cfg}))
    loaded, images = load_model(tmp_path, num_heads=3), golden.images(2, 32, 32)
    assert_computes(loaded, their_logits(model, images), images)


def flax_tree(model: Any) -> dict[str, Any]:
    """As transformers 4's Flax classes held the same model."""
    tree = {}
    for name, value in model.state_dict().items():
        array, last = value.numpy(), name.rpartition(".")[2]
        if last == "weight" and "embedding.weight" in name and array.ndim == 2:
            last = "embedding"
        elif last == "weight" and array.ndim > 1:
            array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
            last = "kernel"
        elif last == "weight":
            last = "scale"
        tree["/".join([*name.split(".")[:-1], last])] = array
    return unflatten_dict(tree, sep="/")


def test_flax_files_of_transformers(tmp_path: Path) -> None:
    transformers = import_transformers()
    transformers.logging.disable_progress_bar()
    model = transformers.CLIPModel(transformers.CLIPConfig(**TOWERS))
    spread(model)
    model.save_pretrained(tmp_path / "torch")
    expected = load_model(tmp_path / "torch")
    (tmp_path / "flax").mkdir()
    shutil.copy(tmp_path / "torch/config.json", tmp_path / "flax")
    content = flax.serialization.msgpack_serialize(flax_tree(model))
    (tmp_path / "flax/flax_model.msgpack").write_bytes(content)
    loaded = load_model(tmp_path / "flax")
    assert loaded.description == expected.description
    weights.assert_same(flatten_names(loaded.params), flatten_names(expected.params))


@pytest.mark.parametrize("name", ["vit_small_patch14_dinov2", "vit_giant_patch14_reg4_dinov2"])
def test_dinov2_of_facebook(name: str, tmp_path: Path) -> None:
    timm = import_timm()
    sizes = {"img_size": 42, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 0}
    model = timm.create_model(name, **sizes).eval()
    spread(model)
    names = [("reg_token", "register_tokens")]
    if "giant" in name:
        names += [("mlp.fc1", "mlp.w12"), ("mlp.fc2", "mlp.w3")]
    renamed = {}
    for key, value in model.state_dict().items():
        for of_timm, of_facebook in names:
            key = key.replace(of_timm, of_facebook)
        renamed[key] = value
    if model.no_embed_class:  # timm adds the class token's row to the token
        row = 0.1 * torch.ones(1, 1, 24)
        renamed["cls_token"] = renamed["cls_token"] - row
        renamed["pos_embed"] = torch.cat([row, renamed["pos_embed"]], dim=1)
    torch.save({**renamed, "mask_token": torch.zeros(1, 24)}, tmp_path / "a.pth")
    loaded, images = load_model(tmp_path / "a.pth", num_heads=3), golden.images(2, 42, 42)
    assert "pre-training" in loaded.report["dropped"]["mask_token"]
    assert_computes(loaded, their_logits(model, images), images)


def test_dino_of_facebook(tmp_path: Path) -> None:
    """The released file has timm's names; a training checkpoint has a student and a teacher."""
    timm = import_timm()
    model = timm.create_model("vit_small_patch16_224", num_classes=0, **SMALL).eval()
    spread(model)
    torch.save(model.state_dict(), tmp_path / "dino_pretrain.pth")
    teacher = {f"backbone.{name}": x for name, x in model.state_dict().items()}
    student = {f"module.backbone.{name}": 2 * x for name, x in model.state_dict().items()}
    head = {"head.mlp.0.weight": torch.zeros(3, 24), "head.last_layer.weight_g": torch.zeros(3, 1)}
    checkpoint = {
        "student": {**student, **{f"module.{n}": x for n, x in head.items()}},
        "teacher": {**teacher, **head},
        "epoch": 3,
    }
    torch.save(checkpoint, tmp_path / "checkpoint.pth")
    expected = load_model(tmp_path / "dino_pretrain.pth", num_heads=3)
    loaded = load_model(tmp_path / "checkpoint.pth", num_heads=3)
    weights.assert_same(flatten_names(loaded.params), flatten_names(expected.params))
    assert loaded.report["dropped"]["head.mlp.0.weight"] == "outside the model"
    other = load_model(f"{tmp_path}/checkpoint.pth#student", num_heads=3)
    np.testing.assert_array_equal(other.params["cls"], 2 * loaded.params["cls"])


def test_deit_3_of_facebook(tmp_path: Path) -> None:
    """timm's names, but for the gammas beside the layers."""
    timm = import_timm()
    sizes = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}
    model = timm.create_model("deit3_small_patch16_224", **sizes).eval()
    spread(model)
    facebook = {
        re.sub(r"ls([12])\.gamma", r"gamma_\1", n): x for n, x in model.state_dict().items()
    }
    assert "blocks.1.gamma_2" in facebook
    torch.save({"model": facebook}, tmp_path / "deit_3.pth")
    loaded, images = load_model(tmp_path / "deit_3.pth", num_heads=3), golden.images(2, 64, 64)
    assert loaded.params["posembed_patches"]["pos_embedding"].shape == (1, 16, 48)
    assert_computes(loaded, their_logits(model, images), images)
