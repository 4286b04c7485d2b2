"""Every format, read and written: what is written reads back bit for bit."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import golden
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.files.paths import write_arrays
from vit_jax.inference.load import attributes, load_model
from vit_jax.models.create import create_model
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.arrays import read_arrays, write_safetensors
from vit_jax.pretrained.formats import google
from vit_jax.pretrained.formats import table as formats
from vit_jax.pretrained.formats.stored import Stored
from vit_jax.pretrained.infer import infer_description
from vit_jax.trees import flatten_names, unflatten_names

IMAGE = (32, 32, 3)
KINDS: dict[str, dict[str, Any]] = {
    "token": {},
    "map": {"classifier": "map"},
    "pre_logits": {"representation_size": 20},
    "sincos2d": {"classifier": "gap", "position_embedding": "sincos2d"},
    "distilled": {"name": "deit", "gelu": "exact"},
    "layer_scale": {"name": "modern_vit", "gelu": "exact", "layer_scale_init": 1e-4},
    "hybrid": {"resnet_layers": (1, 2), "patch_size": 1},
    "no head": {"num_classes": 0},
}
# What a format has no place for, and the reason that it gives.
REFUSED = {
    ("npz_published", "distilled"): "cannot store model.name='deit'",
    ("npz_published", "map"): "model.classifier='map', .*--format=npz, big_vision, timm",
    ("npz_published", "sincos2d"): "cannot store model.position_embedding='sincos2d'",
    ("npz_published", "layer_scale"): "cannot store model.name='modern_vit'",
    ("huggingface", "layer_scale"): "cannot store model.layer_scale_init=0.0001: ViTModel",
    ("big_vision", "layer_scale"): "cannot store model.name='modern_vit'",
    ("big_vision", "distilled"): "cannot store model.name='deit'",
    ("big_vision", "hybrid"): r"cannot store model.resnet_layers=\(1, 2\), only None",
    ("timm", "pre_logits"): "no pre_logits",
    ("timm", "hybrid"): "no such hybrid",
    ("huggingface", "pre_logits"): "no layer between pooling and head",
    ("huggingface", "map"): "model.classifier",
    ("huggingface", "sincos2d"): "model.classifier",
    ("huggingface", "hybrid"): "model.resnet_layers",
}


@functools.cache
def build(kind: str) -> tuple[dict[str, np.ndarray], Description]:
    module = create_model(**{**weights.SMALL, "num_classes": 7, **KINDS[kind]})
    name = KINDS[kind].get("name", "vit")
    image, grid = ((8, 8, 3), (1, 1)) if kind == "hybrid" else (IMAGE, (4, 4))
    description = Description(attributes(module, name), image, grid, (), "official_eval(32)")
    return weights.seeded(module, image), description


def write(path: Path, name: str, params: Any, description: Description) -> Path:
    row = formats.FORMATS[name]
    path = path if row.is_folder else path.with_suffix(".npz")
    inputs = InputSettings("bilinear", description.image_shape[:2], None)
    return row.write(path, params, description, inputs)


def read(path: Path, **kwargs: Any) -> Stored:
    return formats.read_weights(path, read_arrays(path), **kwargs)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", list(formats.FORMATS))
def test_what_is_written_reads_back(name: str, kind: str, tmp_path: Path) -> None:
    params, description = build(kind)
    if (name, kind) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[name, kind]):
            write(tmp_path / "weights", name, params, description)
        return
    path = write(tmp_path / "weights", name, params, description)
    stored = read(path, num_heads=3)
    assert not stored.unexpected
    if name == "big_vision" and "cls" in params:
        # The class token's position row has moved into the class token ...
        cls = params["cls"] + params[POSITIONS][:, :1]
        np.testing.assert_array_equal(stored.params["cls"], cls)
        np.testing.assert_array_equal(stored.params[POSITIONS][:, 1:], params[POSITIONS][:, 1:])
        assert not stored.params[POSITIONS][:, 0].any()
        # ... and from then on it comes back as it is.
        path = write(tmp_path / "again", name, stored.params, description)
        weights.assert_same(read(path).params, stored.params)
    elif name == "timm" and kind == "sincos2d":
        assert stored.params.keys() - params.keys() == {POSITIONS}  # as a parameter
    else:
        weights.assert_same(stored.params, params)
        # Fixed positions show in big_vision's files only.
        if kind != "hybrid" and (kind != "sincos2d" or name == "big_vision"):
            model = infer_description(stored, image_size=(32, 32)).model
            assert model.items() <= {**description.model, "gelu": model["gelu"]}.items()
    # Names in the other direction: the second file holds the same bytes as the first.
    again = write(tmp_path / "second", name, stored.params, description)
    if name != "big_vision" or "cls" not in params:
        assert again.read_bytes() == path.read_bytes()


def test_the_published_names() -> None:
    """The rule of the golden files, and the shapes of the paper's B/16 file."""
    names = golden.table("vit_names")["ViT-Ti_16"]["params"]
    published = google.to_published({name: np.zeros(shape) for name, shape in names.items()})
    block = "Transformer/encoderblock_11/"
    assert f"{block}MultiHeadDotProductAttention_1/query/kernel" in published
    assert f"{block}LayerNorm_2/scale" in published
    assert f"{block}MlpBlock_3/Dense_1/kernel" in published
    assert len(published) == 200
    names = golden.table("vit_names")["R26+ViT-S_32"]["params"]
    published = google.to_published({name: np.zeros(shape) for name, shape in names.items()})
    assert published["gn_root/scale"].shape == (1, 1, 1, 64)


def era(name: str, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same parameters as files of Google's code have held them over the years."""
    if name == "train state":
        arrays = {f"opt/target/{n}": a for n, a in google.to_published(params).items()}
        return {**arrays, "opt/state/step": np.array(3), "opt/state/mu/cls": params["cls"]}
    if name == "posemb at the root with its row":
        moved = {"pos_embedding" if n == POSITIONS else n: a for n, a in params.items()}
        return {f"params/{n}": a for n, a in moved.items()}
    if name == "two towers":
        arrays = {
            n.replace("params/", "params/img/"): a for n, a in google.to_big_vision(params).items()
        }
        return {**arrays, "params/txt/embed": np.zeros(3, np.float32), "params/t": np.zeros(1)}
    if name == "stacked":
        flat = {n.removeprefix("params/"): a for n, a in google.to_big_vision(params).items()}
        stacked = flatten_names(golden.VIT.stack(unflatten_names(flat)))
        return {f"params/{n}": np.asarray(a) for n, a in stacked.items()}
    assert name == "group norms flat"
    return {n: a.reshape(-1) if "gn" in n else a for n, a in google.to_published(params).items()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train state", "token"),
        ("posemb at the root with its row", "token"),
        ("two towers", "map"),
        ("stacked", "sincos2d"),
        ("group norms flat", "hybrid"),
        ("train state", "pre_logits"),
    ],
)
def test_files_of_every_era(name: str, kind: str, tmp_path: Path) -> None:
    params, _ = build(kind)
    arrays = era(name, params)
    assert arrays.keys() != params.keys() or name == "group norms flat"
    path = write_arrays(tmp_path / "old.npz", arrays)
    stored = read(path)
    assert not stored.unexpected
    weights.assert_same(stored.params, params)
    read_names = {*arrays} - {*stored.dropped}
    assert len(read_names) <= len(params)  # nothing but parameters was taken


def test_rectangular_positions_need_their_grid(tmp_path: Path) -> None:
    params, _ = build("token")
    params = params | {POSITIONS: golden.fill(POSITIONS, (1, 16, 24), "fanin")}
    path = write_arrays(tmp_path / "file.npz", google.to_big_vision(params))
    with pytest.raises(UserError, match=r"15 rows.*pretrained\.grid"):
        read(path)
    stored = read(path, grid=(3, 5))
    assert stored.params[POSITIONS].shape == (1, 16, 24)
    assert infer_description(stored, grid=(3, 5)).image_shape == (24, 40, 3)


def test_two_arrays_for_one_parameter(tmp_path: Path) -> None:
    params, _ = build("token")
    name = "Transformer/encoderblock_0/LayerNorm_1/scale"
    arrays = {**params, name.replace("Norm_1", "Norm_2"): params[name]}
    with pytest.raises(UserError, match=r"LayerNorm_2/scale.*both map to the parameter"):
        read(write_arrays(tmp_path / "file.npz", arrays))


Arrays = dict[str, np.ndarray]


def damaged(arrays: Arrays, name: str, rng: np.random.Generator) -> Iterator[Arrays]:
    """One array renamed, removed, of another shape or type, or exchanged for another."""
    array, others = arrays[name], {key: x for key, x in arrays.items() if key != name}
    position = int(rng.integers(len(name)))
    yield {**others, f"{name[:position]}~{name[position + 1 :]}": array}
    yield others
    flat = array.reshape(-1) if array.ndim > 1 else array[None, None]
    for other in (array[None], flat, array[..., :-1], array.astype(np.int32)):
        yield {**others, name: np.ascontiguousarray(other)}
    exchanged = rng.choice([key for key, x in others.items() if x.shape != array.shape])
    yield {**others, name: arrays[exchanged], exchanged: array}


@pytest.mark.parametrize("name", list(formats.FORMATS))
def test_arrays_that_are_not_what_they_should_be(name: str, tmp_path: Path) -> None:
    """A clear error, never a model with other numbers than the file's."""
    params, description = build("token")
    file = write(tmp_path / "file", name, params, description)
    arrays, rng = read_arrays(file), np.random.default_rng(1)
    assert load_model(file).params
    # big_vision has models without these two, so that a file may well lack them: nothing in it
    # tells. (`load_pretrained` notices: the model that is asked for has them.)
    optional = ("params/cls", "params/pos_embedding") if name == "big_vision" else ()
    for chosen in rng.choice(sorted(set(arrays) - set(optional)), 3, replace=False):
        for changed in damaged(arrays, chosen, rng):
            if file.suffix == ".npz":
                write_arrays(file, changed)
            else:
                write_safetensors(file, changed, {})
            with pytest.raises(UserError) as error:
                load_model(file)
            assert "\n" not in str(error.value)
