"""Models for images in shapes of their own: SigLIP 2's NaFlex of transformers, timm's NaFlexVit.

Tiny models with seeded weights, on images of three shapes in rows of as many patches as theirs. The
tolerance is 1e-5 of the largest number: the same function in float32.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests import golden
from tests.peers import import_timm, import_transformers
from tests.pretrained.test_huggingface_classes import NAFLEX, TEXT, assert_close, spread
from vit_jax.data.preprocess import parse
from vit_jax.export.convert import convert_checkpoint
from vit_jax.export.pair import convert_pair
from vit_jax.inference.load import load_model
from vit_jax.pretrained.arrays import write_safetensors

SHAPES = ((70, 50), (40, 40), (20, 90))  # height, width
MOST, PATCH = 20, 8
TOKENS = np.random.default_rng(0).integers(3, 9, (2, 64)).astype(np.int32)


@pytest.fixture(scope="module")
def transformers() -> Any:
    import_timm()
    return import_transformers()


def photographs() -> list[np.ndarray]:
    return [(golden.images(1, *shape)[0] * 127.5 + 127.5).astype(np.uint8) for shape in SHAPES]


def their_patches(model: Any) -> dict[str, torch.Tensor]:
    """What transformers' models take, of our preprocessing."""
    inputs = model.preprocess(photographs())
    count = np.prod(inputs.grid, axis=1)[:, None]
    return {
        "pixel_values": torch.from_numpy(inputs.pixels.copy()),
        "spatial_shapes": torch.from_numpy(inputs.grid.copy()),
        "pixel_attention_mask": torch.from_numpy((np.arange(MOST)[None] < count).astype(np.int32)),
    }


def test_both_towers_of_siglip_2(transformers: Any, tmp_path: Path) -> None:
    """Read, and written: alone, and as one model."""
    text = TEXT | {"hidden_size": 24, "num_attention_heads": 3, "vocab_size": 9}
    config = transformers.Siglip2Config(vision_config=NAFLEX, text_config=text)
    theirs = transformers.Siglip2Model(config)
    spread(theirs)
    theirs.eval().save_pretrained(tmp_path / "theirs")
    settings = {"image_processor_type": "Siglip2ImageProcessor", "max_num_patches": MOST}
    text_of_settings = json.dumps(settings | {"patch_size": PATCH})
    (tmp_path / "theirs/preprocessor_config.json").write_text(text_of_settings)
    images = load_model(tmp_path / "theirs")
    assert images.description.eval_preprocess == f"decode|patchify({MOST}, {PATCH})"
    texts = images.load_texts()  # type: ignore[misc]
    report = convert_pair(str(tmp_path / "theirs"), str(tmp_path / "both"), format="huggingface")
    assert report["parameters_identical"]
    convert_checkpoint(str(tmp_path / "theirs"), str(tmp_path / "one"), format="huggingface")
    inputs = their_patches(images)
    assert len({tuple(grid) for grid in inputs["spatial_shapes"].tolist()}) == len(SHAPES)
    again = transformers.Siglip2Model.from_pretrained(tmp_path / "both").eval()
    alone = transformers.Siglip2VisionModel.from_pretrained(tmp_path / "one").eval()
    ours = {"out": images.features(photographs(), "pre_logits"), "texts": texts.logits(TOKENS)}
    tokens = images.features(photographs(), "tokens")
    with torch.no_grad():
        for model in (theirs, again):
            out = model.get_image_features(**inputs).pooler_output.numpy()
            words = model.get_text_features(input_ids=torch.from_numpy(TOKENS).long())
            assert_close(ours, {"out": out, "texts": words.pooler_output.numpy()})
        output = alone(**inputs)
    hidden = output.last_hidden_state.numpy() * inputs["pixel_attention_mask"].numpy()[..., None]
    assert_close(
        {"out": ours["out"], "tokens": tokens},
        {"out": output.pooler_output.numpy(), "tokens": hidden},
    )


def test_patches_are_those_of_transformers_processor(transformers: Any) -> None:
    """Of PyTorch's resizing, which rounds otherwise than Pillow: one grey level in a few pixels."""
    chain = parse("decode|patchify(40, 8)")
    processor = transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=40)
    for height, width in (*SHAPES, (7, 300), (300, 3), (1, 1), (641, 480)):
        image = (golden.images(1, height, width)[0] * 127.5 + 127.5).astype(np.uint8)
        expected = processor(image, return_tensors="np", input_data_format="channels_last")
        example = chain({"image": image}, np.random.default_rng(0))
        np.testing.assert_array_equal(example["grid"], expected["spatial_shapes"][0])
        count = int(np.prod(example["grid"]))
        levels = expected["pixel_values"][0] * 127.5 + 127.5
        off = np.abs(example["image"][:count] - levels[:count])
        assert off.max() < 1.01, (height, width)
        assert (off > 0.01).mean() < 0.25
        assert not example["image"][count:].any()


COMMON = {"patch_size": PATCH, "embed_dim": 24, "depth": 2, "num_heads": 3, "img_size": None}
AVERAGE = {"init_values": 0.5, "global_pool": "avg", "reg_tokens": 4, "fc_norm": True}
SQUARE = {"pos_embed_ar_preserving": True}
FORMS: dict[str, dict[str, Any]] = {
    "naflexvit_base_patch16_gap": AVERAGE,
    "naflexvit_base_patch16_par_gap": AVERAGE | SQUARE,
    "naflexvit_base_patch16_parfac_gap": AVERAGE | SQUARE | {"pos_embed": "factorized"},
    "naflexvit_base_patch16_map": {"init_values": 0.5, "global_pool": "map", "reg_tokens": 1},
    "naflexvit_so150m2_patch16_reg1_gap": AVERAGE | {"qkv_bias": False, "reg_tokens": 1},
    "naflexvit_base_patch16_siglip": {
        "act_layer": "gelu_tanh",
        "global_pool": "map",
        "pos_embed_interp_mode": "bilinear",
    },
}


def their_logits(timm: Any, name: str, arguments: dict[str, Any], model: Any) -> Any:
    """The model of timm with these arguments, and what it makes of our patches."""
    made = timm.create_model(name, pretrained=False, num_classes=10, **COMMON, **arguments).eval()
    return made, logits_of(made, model) if model else None


def logits_of(made: Any, model: Any) -> np.ndarray:
    inputs = their_patches(model)
    rows = [np.indices(grid).reshape(2, -1).T for grid in inputs["spatial_shapes"].tolist()]
    places = [np.pad(row, ((0, MOST - len(row)), (0, 0))) for row in rows]
    with torch.no_grad():
        out = made(
            {
                "patches": inputs["pixel_values"],
                "patch_coord": torch.from_numpy(np.stack(places)),
                "patch_valid": inputs["pixel_attention_mask"].bool(),
            }
        )
    return out.numpy()


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_timms_naflexvit(name: str, tmp_path: Path) -> None:
    timm = import_timm()
    grid = {"pos_embed_grid_size": (5, 5)}
    made = timm.create_model(name, num_classes=10, **COMMON, **FORMS[name], **grid).eval()
    spread(made)
    (tmp_path / "theirs").mkdir()
    arrays = {key: value.numpy() for key, value in made.state_dict().items()}
    write_safetensors(tmp_path / "theirs/model.safetensors", arrays, {"format": "pt"})
    config = {
        "architecture": name,
        "num_classes": 10,
        "global_pool": FORMS[name]["global_pool"],
        "model_args": {key: FORMS[name][key] for key in ("act_layer",) if key in FORMS[name]},
        "pretrained_cfg": {"input_size": [3, 36, 40], "mean": [0.5] * 3, "std": [0.5] * 3},
    }
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    loaded = load_model(tmp_path / "theirs", num_heads=3)
    assert loaded.description.eval_preprocess == "decode|patchify(20, 8, 'pillow_bicubic')"
    theirs = logits_of(made, loaded)
    assert np.abs(theirs[0] - theirs[1]).max() > 0.1
    assert_close({"out": loaded.logits(photographs())}, {"out": theirs})
    convert_checkpoint(str(tmp_path / "theirs"), str(tmp_path / "ours"), format="timm", num_heads=3)
    again = load_model(tmp_path / "ours")
    assert again.module == loaded.module
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    model = timm.create_model(f"local-dir:{tmp_path}/ours", pretrained=True).eval()
    assert_close({"out": logits_of(model, loaded)}, {"out": theirs})
