"""Every class of transformers for images without a pyramid: read with parity, or refused.

Tiny models from their configurations. 1e-5 of the largest number: both sides compute the same
function in float32, of numbers about 1; the largest difference is some 2e-6.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests import golden
from tests.peers import import_transformers
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.inference.load import attributes, load_model
from vit_jax.models.features import feature_function
from vit_jax.parameters.names import flatten_names

transformers: Any = None  # imported when the first test begins: it takes 3 s
SAME = 1e-5

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
RATIO = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
RATIO |= {"mlp_ratio": 2, "layerscale_value": 0.5}
TEXT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
TOWERS = {"vision_config": SIZES, "text_config": {**TEXT, "vocab_size": 9}}
NAFLEX = {key: value for key, value in SIZES.items() if key != "image_size"} | {"num_patches": 16}
DINOV3 = SIZES | {"layerscale_value": 0.5, "num_register_tokens": 2}


class Case(NamedTuple):
    cls: str
    config: dict[str, Any]
    model: str  # ours, or the reason of a refusal
    note: str = ""


CASES = [
    Case("ViTModel", SIZES, "vit", "with its pooler"),
    Case("ViTForImageClassification", SIZES, "vit"),
    Case("ViTForImageClassification", SIZES | {"qkv_bias": False}, "modern_vit", "qkv_bias=False"),
    Case("ViTForImageClassification", SIZES | {"hidden_act": "quick_gelu"}, "modern_vit", "QuickGELU"),
    Case("ViTForMaskedImageModeling", SIZES, "vit", "without its decoder"),
    Case("DeiTModel", SIZES, "deit", "without the pooler"),
    Case("DeiTForImageClassification", SIZES, "modern_vit", "distillation token as a register"),
    Case("DeiTForImageClassificationWithTeacher", SIZES, "deit"),
    Case("ViTMAEModel", SIZES | {"mask_ratio": 0.0}, "vit"),
    Case("ViTMSNModel", SIZES, "vit"),
    Case("ViTMSNForImageClassification", SIZES, "vit"),
    Case("IJepaModel", SIZES, "vit"),
    Case("IJepaForImageClassification", SIZES, "vit"),
    Case("BeitModel", SIZES | {"use_relative_position_bias": True}, "modern_vit", "relative positions"),
    Case("BeitForImageClassification", SIZES | {"use_shared_relative_position_bias": True}, "modern_vit", "shared relative positions"),
    Case("BeitForImageClassification", SIZES | {"use_absolute_position_embeddings": True, "use_mean_pooling": False, "layer_scale_init_value": 0.0}, "modern_vit", "absolute positions, class token"),
    Case("BeitForMaskedImageModeling", SIZES | {"vocab_size": 9, "use_mask_token": True}, "modern_vit", "without its head"),
    Case("Data2VecVisionModel", SIZES, "modern_vit"),
    Case("Data2VecVisionForImageClassification", SIZES | {"use_shared_relative_position_bias": True, "use_relative_position_bias": True}, "modern_vit", "both relative positions"),
    Case("Dinov2Model", RATIO, "modern_vit"),
    Case("Dinov2ForImageClassification", RATIO | {"use_swiglu_ffn": True}, "modern_vit", "SwiGLU"),
    Case("Dinov2WithRegistersModel", RATIO | {"use_swiglu_ffn": True, "qkv_bias": False}, "modern_vit", "SwiGLU, qkv_bias=False"),
    Case("Dinov2WithRegistersForImageClassification", RATIO, "modern_vit"),
    Case("DINOv3ViTModel", DINOV3, "modern_vit"),
    Case("DINOv3ViTModel", DINOV3 | {"use_gated_mlp": True, "hidden_act": "silu", "query_bias": False, "value_bias": False, "num_register_tokens": 0, "rope_theta": 50.0}, "modern_vit", "SwiGLU, no biases"),
    Case("CLIPVisionModel", SIZES, "modern_vit"),
    Case("CLIPVisionModelWithProjection", SIZES | {"projection_dim": 10}, "modern_vit"),
    Case("CLIPModel", TOWERS | {"projection_dim": 10}, "modern_vit", "its tower of images"),
    Case("CLIPForImageClassification", TOWERS, "modern_vit"),
    Case("SiglipVisionModel", SIZES, "vit"),
    Case("SiglipModel", TOWERS, "vit", "its tower of images"),
    Case("SiglipForImageClassification", TOWERS, "vit"),
    Case("Siglip2VisionModel", NAFLEX, "vit", "square images of its positions' size"),
]

WRITTEN = {
    "ViTForImageClassification": "ViTForImageClassification",
    "BeitModel": "BeitModel",
    "BeitForImageClassification": "BeitForImageClassification",
    "Data2VecVisionForImageClassification": "BeitForImageClassification",
    **{name: name for name in ("Dinov2Model", "Dinov2ForImageClassification")},
    **{f"Dinov2WithRegisters{end}": f"Dinov2WithRegisters{end}" for end in ("Model", "ForImageClassification")},
    "DINOv3ViTModel": "DINOv3ViTModel",
    "CLIPVisionModel": "CLIPVisionModel",
    "CLIPVisionModelWithProjection": "CLIPVisionModelWithProjection",
    "CLIPModel": "CLIPVisionModelWithProjection",
}


@pytest.fixture(autouse=True, scope="module")
def _import() -> Iterator[None]:
    globals()["transformers"] = import_transformers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield


def their_model(case: Case) -> Any:
    cls = getattr(transformers, case.cls)
    kwargs = {"num_labels": 10} if "ForImageClass" in case.cls else {}
    model = cls(cls.config_class(**case.config, **kwargs))
    spread(model)
    return model.eval()


def spread(model: Any) -> None:
    """Numbers so large that scores, biases and gammas matter: at 0.02 no attention is seen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim in (2, 4):
                parameter.copy_(noise / np.sqrt(parameter[0].numel()))
            else:
                parameter += 0.3 * noise


def load(name: str, folder: Path) -> Any:
    """Their model from our folder; every one of its parameters must be in it."""
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def their_features(model: Any, images: np.ndarray) -> dict[str, np.ndarray]:
    """`out`: logits, embedding or pooled output; `tokens` and those after each block."""
    pixels: dict[str, Any] = {"pixel_values": torch.from_numpy(images.transpose(0, 3, 1, 2).copy())}
    name = type(model).__name__
    if name.startswith("Siglip2"):
        patches = images.reshape(len(images), 4, 8, 4, 8, 3).transpose(0, 1, 3, 2, 4, 5)
        pixels["pixel_values"] = torch.from_numpy(patches.reshape(len(images), 16, -1).copy())
        pixels["spatial_shapes"] = torch.tensor([[4, 4]] * len(images))
        pixels["pixel_attention_mask"] = torch.ones(len(images), 16)
    if name == "ViTMAEModel":
        pixels["noise"] = torch.arange(16.0).tile(len(images), 1)
    with torch.no_grad():
        if name in ("CLIPModel", "SiglipModel"):
            found = {"out": model.get_image_features(**pixels).pooler_output}
            model = model.vision_model
        output = model(**pixels, output_hidden_states=True)
    if name not in ("CLIPModel", "SiglipModel"):
        found = {}
        for key in ("logits", "image_embeds", "pooler_output"):
            value = output.get(key)
            if value is not None and not found and "Masked" not in name and name != "DeiTModel":
                found["out"] = value
    states = output.hidden_states or ()
    for i in range(len(states) - 1 if states else 0):
        found[f"block_{i}_tokens"] = states[i + 1]
    if name.endswith("Model") and "CLIP" not in name and "last_hidden_state" in output:
        found["tokens"] = output.last_hidden_state
    return {key: value.numpy() for key, value in found.items()}


def compare(model: Any, loaded: Any, images: np.ndarray) -> float:
    """The largest difference, relative to the largest number of each feature."""
    theirs = their_features(model, images)
    assert theirs
    inside = [name for name in theirs if name != "out"]
    features = feature_function(loaded.module, ["logits", *inside])(loaded.params, images)
    found = {name: np.asarray(value) for name, value in features.items()}
    if "out" in theirs:
        found["out"] = found["logits"]
    differences = {}
    for name, expected in theirs.items():
        assert found[name].shape == expected.shape, name
        differences[name] = np.abs(found[name] - expected).max() / np.abs(expected).max()
    print(f"{type(model).__name__}: {differences}")
    return float(max(differences.values()))


@pytest.mark.parametrize("case", CASES, ids=[f"{case.cls}-{i}" for i, case in enumerate(CASES)])
def test_every_class(case: Case, tmp_path: Path) -> None:
    model, images = their_model(case), golden.images(2, 32, 32)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.description.model["name"] == case.model
    assert compare(model, loaded, images) < SAME
    if case.model == "modern_vit" and case.cls in WRITTEN:
        flat = flatten_names(loaded.params)
        weights.write(tmp_path / "ours", "huggingface", loaded.module, flat, (32, 32, 3), "modern_vit")
        again = load_model(tmp_path / "ours")
        weights.assert_same(flatten_names(again.params), flat)
        assert attributes(again.module, "") == attributes(loaded.module, "")
        theirs = their_features(load(WRITTEN[case.cls], tmp_path / "ours"), images)
        for name, expected in their_features(model, images).items():
            np.testing.assert_allclose(theirs[name], expected, rtol=0, atol=SAME, err_msg=name)

