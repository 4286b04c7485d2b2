"""Every published set of weights of timm's plain Vision Transformers: read, or refused with why.

Each architecture in timm's registry is built without weights and its hub folder is imitated (names,
shapes, `config.json`) and read: all sizes must be those of timm's modules. Architectures that are
the same function but for sizes are one form. Of each form one is built narrow, with seeded weights,
and its logits are compared; the others must get the same attributes. docs/weights.md has the table.
"""

import collections
import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from tests import golden
from tests.peers import import_timm
from tests.pretrained import weights
from tests.pretrained.test_timm_parity import SAME, arrays_of, their_logits
from tests.pretrained.weights import difference, randomise
from vit_jax import ROOT
from vit_jax.errors import UserError
from vit_jax.inference.load import load_model
from vit_jax.models.description import InputSettings
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.pretrained.formats.table import FORMATS, read_weights
from vit_jax.pretrained.infer import infer_description
from vit_jax.pretrained.load import _add_entry
from vit_jax.pretrained.zoo.entries import entries
from vit_jax.trees import flatten_names

timm = import_timm()

# timm's files, by the argument of their models that is the number of blocks.
FILES = {"vision_transformer": "depth", "eva": "depth", "deit": "depth", "resnetv2": ""}
FILES |= {"mlp_mixer": "", "vision_transformer_hybrid": "depth", "beit": "depth"}
# Their logits are compared by test_timm_resnet.py and test_timm_parity.py.
ELSEWHERE = ("resnetv2", "mlp_mixer", "vision_transformer_hybrid")
# What is refused, and why.
REFUSED = {
    "vit_d(little|wee|pwee)_.*": "differential attention",
    "vit_pwee_.*": "attention and MLP in parallel",
    "vit_base_mci_224": "a stem of convolutions and batch norms",
    "gmlp_.*": "spatial gating units",
    r"resnetv2_\d+(d|d_evos|d_gn)": "a stem of three convolutions",
    r"resnetv2_\d+": "batch normalisation",
}
DEEP = re.compile("mixed|sapiens2")  # whose blocks are in one array, or differ
SIZES = {"hidden_size": "embed_dim", "num_heads": "blocks.0.attn.num_heads"}
SIZES |= {"patch_size": "patch_embed.patch_size", "mlp_dim": "blocks.0.mlp.fc2.in_features"}


# Settings of modules that do not change what they compute for images of one size.
NO_FUNCTION = ("training", "fused_attn", "scale", "p", "dynamic_img_size", "dynamic_img_pad")
NO_FUNCTION += ("strict_img_size", "flatten")


# The zoo's rows by architecture.
ENTRIES = collections.defaultdict(list)
for entry in entries().values():
    if entry.family == "timm":
        ENTRIES[entry.name.removeprefix("timm/").partition(".")[0]].append(entry)


class Read(NamedTuple):
    """One architecture: its number of sets, its form, and what became of its file here."""

    architecture: str
    sets: int
    form: str
    model: dict[str, Any]  # our attributes without sizes
    refused: str


def build(architecture: str, file: str, depth: int, **args: Any) -> tuple[Any, dict[str, Any]]:
    """With `depth` blocks, and the arguments that its `config.json` has to say."""
    if FILES[file]:
        args[FILES[file]] = depth
    if "sapiens2" in architecture:  # all heads of its inner blocks share keys and values
        args["num_kv_heads"] = [None, 1][-depth:]
    return timm.create_model(architecture, **args), args


@functools.cache  # of the first of each form twice
def outline(architecture: str, file: str) -> tuple[Any, dict[str, Any]]:
    with weights.without_numbers(), mock.patch("torch.nn.init.kaiming_normal_"):
        return build(architecture, file, 2 if DEEP.search(architecture) else 1)


def form_of(model: Any) -> str:
    """What tells models apart that are not the same function of some sizes.

    By the place of each module: its kind, settings that are no sizes, and which parameters it has.
    """
    seen = {}
    for name, module in model.named_modules():
        settings = {k: v for k, v in vars(module).items() if isinstance(v, bool | str | float)}
        settings = {k: v for k, v in settings.items() if k not in NO_FUNCTION}
        if name == "head":  # with classes or without
            continue
        parameters = [k for k, value in module._parameters.items() if value is not None]
        place = re.sub(r"\d+", "#", name)
        seen[place] = [type(module).__name__, settings, parameters]
    return json.dumps([seen, getattr(getattr(model, "rope", None), "ref_feat_shape", None)])


def write_config(folder: Path, model: Any, architecture: str, args: dict[str, Any]) -> None:
    """The `config.json` of a hub folder."""
    keys = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
    config = {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "global_pool": getattr(model, "global_pool", ""),
        "model_args": args,
        "pretrained_cfg": {k: model.pretrained_cfg[k] for k in keys if k in model.pretrained_cfg},
    }
    (folder / "config.json").write_text(json.dumps(config))


def attribute(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = model[int(name)] if name.isdigit() else getattr(model, name, None)
        if model is None:
            return None
    return model


def read(architecture: str, sets: int, file: str, folder: Path) -> Read:
    """Reads zeros in the shapes of the architecture, compares all sizes, and what the zoo says."""
    model, args = outline(architecture, file)
    form = form_of(model)
    write_config(folder, model, architecture, args)
    zero = np.float32(0)
    arrays = {name: np.broadcast_to(zero, x.shape) for name, x in model.state_dict().items()}
    try:
        stored = read_weights(folder / "model.safetensors", arrays)
        assert not stored.unexpected, (architecture, stored.unexpected)
        attributes = infer_description(stored).model
    except UserError as error:
        return Read(architecture, sets, form, {}, str(error).partition(": ")[2])
    for ours, theirs in SIZES.items():
        if (size := attribute(model, theirs)) and ours in attributes:
            size = size[0] if isinstance(size, tuple) else size
            assert attributes[ours] == size, (architecture, ours)
    for entry in ENTRIES.get(architecture, []):  # UserError if the zoo says something else
        depth = {key: attributes[key] for key in attributes if key == "num_layers"}
        _add_entry(stored, dataclasses.replace(entry, attributes={**entry.attributes, **depth}))
    sizes = ("layers", "dim", "size", "heads", "registers", "width_factor", "rope_grid", "classes")
    form_only = {key: value for key, value in attributes.items() if not key.endswith(sizes)}
    if "layer_scale_init" in form_only:  # only whether there is one matters to trained weights
        form_only["layer_scale_init"] = form_only["layer_scale_init"] is not None
    return Read(architecture, sets, form, form_only, "")


def compare(architecture: str, file: str, folder: Path) -> float:
    """The largest difference of logits of a narrow model with an image of 4 x 4 patches."""
    full, _ = outline(architecture, file)
    size = [4 * side for side in full.patch_embed.patch_size]
    torch.manual_seed(0)
    depth = 2 if "mixed" in architecture else 1
    model, args = build(architecture, file, depth, embed_dim=96, num_heads=3, img_size=size)
    randomise(model)
    images = golden.images(2, *size)
    write_safetensors(folder / "model.safetensors", arrays_of(model), {})
    write_config(folder, model, architecture, args)
    loaded = load_model(folder)
    ours = weights.logits(loaded.module, loaded.params, images)
    theirs = their_logits(model, images)
    assert ours.shape == theirs.shape
    check_what_we_write(loaded, images, theirs, folder / "written")
    return difference(ours, theirs)


def check_what_we_write(loaded: Any, images: np.ndarray, theirs: np.ndarray, folder: Path) -> None:
    """timm computes the same from our folder: but for positions that were added to tokens."""
    shutil.rmtree(folder, ignore_errors=True)
    inputs = InputSettings("bicubic", images.shape[1:3], None)
    params = flatten_names(loaded.params)
    FORMATS["timm"].write(folder, params, loaded.description, inputs)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert difference(their_logits(model, images), theirs) < 1e-6


@pytest.mark.parametrize("file", FILES)
def test_registry(file: str, tmp_path: Path) -> None:
    sets = collections.Counter(name.partition(".")[0] for name in timm.list_pretrained())
    architectures = [
        read(architecture, sets[architecture], file, tmp_path)
        for architecture in sorted(timm.list_models(module=file))
        if sets[architecture]
    ]
    forms = collections.defaultdict(list)
    for row in architectures:
        if row.refused:
            [why] = (why for name, why in REFUSED.items() if re.fullmatch(name, row.architecture))
            assert f"has {why}" in row.refused, row
        else:
            forms[row.form].append(row)
    largest = 0.0
    for first, *others in forms.values():
        for other in others:
            assert other.model == first.model, (first.architecture, other.architecture)
        if file not in ELSEWHERE:
            largest = max(largest, compare(first.architecture, file, tmp_path))
            assert largest < SAME, first.architecture
    # 1e-6 and less depends on the machine.
    refused = sum(row.sets for row in architectures if row.refused)
    whole = sum(row.sets for row in architectures)
    line = f"| `{file}.py` | {whole} | {whole - refused} | {refused} | {len(forms)} |"
    print(line, f"largest difference {largest:.1e}")
    assert line in (ROOT / "docs/weights.md").read_text()
