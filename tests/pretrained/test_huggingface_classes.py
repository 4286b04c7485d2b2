"""Every class of transformers for images without a pyramid: read with parity, or refused.

Tiny models from their configurations. 1e-5 of the largest number: both sides compute the same
function in float32, of numbers about 1; the largest difference is some 2e-6.
"""

import functools
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch

from tests import golden
from tests.peers import import_timm, import_transformers
from tests.pretrained import weights
from tests.pretrained.test_huggingface_parity import load
from vit_jax.errors import UserError
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model
from vit_jax.models.features import feature_function
from vit_jax.pretrained.arrays import read_arrays, write_safetensors
from vit_jax.trees import flatten_names

transformers: Any = None  # imported when the first test begins: it takes 3 s
SAME = 1e-5

SIZES: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
SIZES |= {"intermediate_size": 48, "image_size": 32, "patch_size": 8}
RATIO = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
RATIO |= {"mlp_ratio": 2, "layerscale_value": 0.5}
TEXT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
TOWERS = {"vision_config": SIZES, "text_config": {**TEXT, "vocab_size": 9}}
NAFLEX = {key: value for key, value in SIZES.items() if key != "image_size"} | {"num_patches": 16}
DINOV3 = SIZES | {"layerscale_value": 0.5, "num_register_tokens": 2}


class Case(NamedTuple):
    cls: str
    config: dict[str, Any]
    model: str  # the kind of ours; "" if it is refused
    note: str = ""  # for the documentation; of a refusal, what it says
    written: str = ""  # the class that is written for it


TIMM = {
    "architecture": "vit_tiny_patch16_224",
    "model_args": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
}
SHARED = {"use_shared_relative_position_bias": True}
RELATIVE = {"use_relative_position_bias": True}
ABSOLUTE = {"use_absolute_position_embeddings": True}
TOKEN = {
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": False,
    "layer_scale_init_value": 0.0,
}
MASKED = {"vocab_size": 9, "use_mask_token": True}
SWIGLU = {"use_swiglu_ffn": True}
SILU = {"use_gated_mlp": True, "hidden_act": "silu"}
UNBIASED = {"query_bias": False, "value_bias": False, "num_register_tokens": 0, "rope_theta": 50.0}
VIDEO, NO_BIAS = {"num_frames": 4}, {"qkv_bias": False}
VIT, DINOV2 = "ViTForImageClassification", "Dinov2ForImageClassification"
BEIT, DATA2VEC = "BeitForImageClassification", "Data2VecVisionForImageClassification"
REGISTERS, HEADLESS = "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersModel"
PROJECTION = "CLIPVisionModelWithProjection"
TEACHER = "DeiTForImageClassificationWithTeacher"
CASES = [
    Case("ViTModel", SIZES, "vit", "with its pooler"),
    Case(VIT, SIZES, "vit", "", VIT),
    Case(VIT, SIZES | NO_BIAS, "modern_vit", "`qkv_bias=False`", VIT),
    Case(VIT, SIZES | {"hidden_act": "quick_gelu"}, "modern_vit", "QuickGELU", VIT),
    Case("ViTForMaskedImageModeling", SIZES, "vit", "without its decoder"),
    Case("DeiTModel", SIZES, "deit", "without its pooler"),
    Case("DeiTForImageClassification", SIZES, "modern_vit", "its second token is a register"),
    Case(TEACHER, SIZES, "deit", "", TEACHER),
    Case("ViTMAEModel", SIZES | {"mask_ratio": 0.0}, "vit", "of all patches"),
    Case("ViTMSNModel", SIZES, "vit"),
    Case("ViTMSNForImageClassification", SIZES, "vit"),
    Case("IJepaModel", SIZES, "vit"),
    Case("IJepaForImageClassification", SIZES, "vit"),
    Case("BeitModel", SIZES | RELATIVE, "modern_vit", "relative positions", "BeitModel"),
    Case(BEIT, SIZES | SHARED, "modern_vit", "shared relative positions", BEIT),
    Case(BEIT, SIZES | TOKEN, "modern_vit", "learned positions, class token", BEIT),
    Case("BeitForMaskedImageModeling", SIZES | MASKED, "modern_vit", "without its head"),
    Case("BeitModel", SIZES | RELATIVE | {"image_size": [32, 64]}, "", "not of a square grid"),
    Case("Data2VecVisionModel", SIZES, "modern_vit", "no norm after the blocks"),
    Case(DATA2VEC, SIZES | SHARED | RELATIVE, "modern_vit", "both relative positions", BEIT),
    Case("Dinov2Model", RATIO, "modern_vit", "", "Dinov2Model"),
    Case(DINOV2, RATIO | SWIGLU, "modern_vit", "SwiGLU", DINOV2),
    Case(HEADLESS, RATIO | SWIGLU | NO_BIAS, "modern_vit", "SwiGLU, `qkv_bias=False`", HEADLESS),
    Case(REGISTERS, RATIO, "modern_vit", "", REGISTERS),
    Case("DINOv3ViTModel", DINOV3, "modern_vit", "", "DINOv3ViTModel"),
    Case("DINOv3ViTModel", DINOV3 | SILU | UNBIASED, "modern_vit", "SwiGLU", "DINOv3ViTModel"),
    Case("DINOv3ViTModel", DINOV3 | {"use_gated_mlp": True}, "", "hidden_act of gated MLPs='gelu'"),
    Case("CLIPVisionModel", SIZES, "modern_vit", "", "CLIPVisionModel"),
    Case(PROJECTION, SIZES | {"projection_dim": 10}, "modern_vit", "", PROJECTION),
    Case("CLIPModel", TOWERS | {"projection_dim": 10}, "modern_vit", "images' tower", PROJECTION),
    Case("CLIPForImageClassification", TOWERS, "modern_vit"),
    Case("SiglipVisionModel", SIZES, "vit", "", "SiglipVisionModel"),
    Case("SiglipModel", TOWERS, "vit", "images' tower"),
    Case("SiglipForImageClassification", TOWERS, "vit"),
    Case("Siglip2VisionModel", NAFLEX, "vit", "images in shapes of their own"),
    Case("TimmWrapperForImageClassification", TIMM, "vit", "the model of timm inside"),
    Case("YolosModel", SIZES | {"image_size": [32, 32]}, "", "embeddings.detection_tokens"),
    Case("Aimv2VisionModel", SIZES, "", "names match no supported Vision Transformer"),
    Case("ASTModel", SIZES | {"max_length": 32, "num_mel_bins": 32}, "", "a model for sounds"),
    Case("VideoMAEModel", SIZES | VIDEO, "", "a model for videos"),
    Case("VivitModel", SIZES | VIDEO | {"patch_size": 8}, "", "a model for videos"),
]


@pytest.fixture(autouse=True, scope="module")
def _import() -> None:
    import_timm()
    globals()["transformers"] = import_transformers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


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


def their_features(model: Any, images: np.ndarray) -> dict[str, np.ndarray]:
    """`out`: logits, embedding or pooled output; `tokens`, and those after each block."""
    name, features = type(model).__name__, {}
    pixels: dict[str, Any] = {"pixel_values": torch.from_numpy(images.transpose(0, 3, 1, 2).copy())}
    if name.startswith("Siglip2"):
        patches = images.reshape(len(images), 4, 8, 4, 8, 3).transpose(0, 1, 3, 2, 4, 5)
        pixels = {
            "pixel_values": torch.from_numpy(patches.reshape(len(images), 16, -1).copy()),
            "spatial_shapes": torch.tensor([[4, 4]] * len(images)),
            "pixel_attention_mask": torch.ones(len(images), 16),
        }
    if name == "ViTMAEModel":  # keeps all patches in order
        pixels["noise"] = torch.arange(16.0).tile(len(images), 1)
    with torch.no_grad():
        if hasattr(model, "get_image_features"):
            features["out"] = model.get_image_features(**pixels).pooler_output
            model = model.vision_model
        output = model(**pixels, output_hidden_states=not name.startswith("Timm"))
    keys = [key for key in ("logits", "image_embeds", "pooler_output") if key in output]
    if keys and not features and "Masked" not in name and name != "DeiTModel":
        features["out"] = output[keys[0]]
    for i, state in enumerate((output.hidden_states or ())[1:]):
        features[f"block_{i}_tokens"] = state
    if name.endswith("Model") and "CLIP" not in name:  # CLIP's are before the last norm
        features["tokens"] = output.last_hidden_state
    return {key: value.numpy() for key, value in features.items()}


@functools.cache  # several classes are the same model
def compiled(module: Any, names: tuple[str, ...]) -> Any:
    return jax.jit(feature_function(module, names))


def ours(loaded: Any, theirs: dict[str, Any], images: np.ndarray) -> dict[str, np.ndarray]:
    """The same of our model."""
    names = ("logits", *(name for name in theirs if name != "out"))
    features = compiled(loaded.module, names)(loaded.params, images)
    return {name: np.asarray(features["logits" if name == "out" else name]) for name in theirs}


def assert_close(features: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in expected.items():
        tolerance = SAME * np.abs(array).max()
        np.testing.assert_allclose(features[name], array, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.cls}-{i}" for i, case in enumerate(CASES)])
def test_every_class(case: Case, tmp_path: Path) -> None:
    """Logits, embeddings, tokens after each block; what is written computes the same there.

    Files have the names of transformers 4, models in memory those of transformers 5.
    """
    model, images = their_model(case), golden.images(2, 32, 32)
    model.save_pretrained(tmp_path)
    if not case.model:
        with pytest.raises(UserError, match=re.escape(case.note)):
            load_model(tmp_path)
        return
    loaded = load_model(tmp_path)
    assert loaded.description.model["name"] == case.model
    theirs = their_features(model, images)
    assert theirs
    assert_close(ours(loaded, theirs, images), theirs)
    flat, state = flatten_names(loaded.params), model.state_dict().items()
    write_safetensors(tmp_path / "model.safetensors", {n: x.numpy() for n, x in state}, {})
    weights.assert_same(flatten_names(load_model(tmp_path).params), flat)
    if case.written:
        folder = tmp_path / "ours"
        weights.write(folder, "huggingface", loaded.module, flat, (32, 32, 3), case.model)
        again = load_model(folder)
        weights.assert_same(flatten_names(again.params), flat)
        assert again.module == loaded.module
        assert_close(their_features(load(case.written, folder), images), theirs)


@pytest.mark.parametrize(
    "case", [Case("Dinov2Model", RATIO, ""), Case("CLIPVisionModel", SIZES, "")]
)
def test_a_file_without_its_positions_is_not_a_model_without_any(case, tmp_path):
    their_model(case).save_pretrained(tmp_path)
    arrays = read_arrays(tmp_path / "model.safetensors")
    kept = {name: x for name, x in arrays.items() if "position_embedding" not in name}
    write_safetensors(tmp_path / "model.safetensors", kept, {})
    with pytest.raises(UserError, match="pos_embedding missing"):
        load_model(tmp_path)


def test_the_table_in_the_documentation() -> None:
    rows = ["| class | read as | written as | |", "|---|---|---|---|"]
    for case in CASES:
        model = f"`{case.model}`" if case.model else "refused"
        note = case.note if case.model else f"`{case.note}`"
        rows.append(f"| `{case.cls}` | {model} | {case.written and f'`{case.written}`'} | {note} |")
    page = Path(__file__).parents[2] / "docs" / "weights.md"
    assert "\n".join(rows) in page.read_text(), "\n".join(rows)


@pytest.mark.parametrize(
    ("cls", "config", "size"),
    [
        ("ViTModel", SIZES, (48, 64)),
        ("DeiTModel", SIZES, (48, 64)),
        ("Dinov2Model", RATIO, (48, 64)),
        ("Dinov2Model", RATIO, (16, 24)),
        ("Dinov2WithRegistersModel", RATIO, (16, 24)),  # antialiased, unlike the others
        ("CLIPVisionModel", SIZES, (48, 64)),
        ("SiglipVisionModel", SIZES, (48, 64)),
        ("BeitModel", SIZES | RELATIVE, (48, 48)),
        ("BeitModel", SIZES | RELATIVE, (16, 16)),
        ("BeitModel", SIZES | SHARED | ABSOLUTE, (48, 48)),
    ],
)
def test_other_sizes_as_transformers_takes_them(cls, config, size, tmp_path):
    """It interpolates when it runs, ours when it loads; the format tells how."""
    model, images = their_model(Case(cls, config, "")), golden.images(1, *size)
    model.save_pretrained(tmp_path)
    if "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        model.forward = functools.partial(model.forward, interpolate_pos_encoding=True)
    theirs = their_features(model, images)
    assert_close(ours(load_model(tmp_path, image_size=size), theirs, images), theirs)


def test_what_no_class_computes(tmp_path: Path) -> None:
    sizes = {**weights.SMALL, "name": "modern_vit", "layer_scale_init": 1.0, "num_classes": 0}
    rope = {"rope": "mixed", "position_embedding": "none"}
    registers = {"num_registers": 2, "classifier": "token", "num_classes": 7}
    for changes, message in (
        ({"norm_kind": "rms"}, "model.norm_kind='rms': Dinov2Model, the nearest"),
        (rope, "model.rope='mixed'.*DINOv3ViTModel, the nearest"),
        (registers, "num_classes=7: Dinov2WithRegistersModel"),
        ({"mlp_dim": 40}, "model.mlp_dim=40, no multiple of the width"),
    ):
        module = create_model(**{**sizes, **changes})
        params = weights.seeded(module, (32, 32, 3))
        with pytest.raises(UserError, match=message):
            weights.write(tmp_path, "huggingface", module, params, (32, 32, 3), "modern_vit")
