"""Every kind of model goes through all that comes after its training.

The tests iterate over MODELS, so that a kind that is added is tested without a line here. What a
kind has not, or a format cannot hold, is said in one line.
"""

import functools
import itertools
import logging
import math
import re
from pathlib import Path
from typing import Any

import cv2
import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests import golden, tiny
from tests.kinds import BEIT, DINOV3, OF_IMAGES, shape_of, small
from tests.pretrained import weights
from tests.saved_models import save_model
from vit_jax.data.pipeline import to_device
from vit_jax.errors import UserError
from vit_jax.export.convert import FORMAT_NAMES, convert_checkpoint
from vit_jax.export.write import export_model
from vit_jax.inference.analysis import principal_filters
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.features import extract_features
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.inference.predict import predict
from vit_jax.inference.probe import probe
from vit_jax.inference.visualize import visualize
from vit_jax.models.create import MODELS, VARIANTS, VARIANTS_OF, create_model, recognise, variant_of
from vit_jax.models.features import available_features
from vit_jax.models.look import INSIDE, can_show
from vit_jax.parameters.sharding import batch_sharding, create_mesh
from vit_jax.parameters.table import ParameterTable, table_of
from vit_jax.plan.plan import make_plan, remedies
from vit_jax.plan.topology import parse_topology
from vit_jax.pretrained.infer import infer_model
from vit_jax.pretrained.load import load_pretrained
from vit_jax.report.report import write_report
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate
from vit_jax.trees import flatten_names
from vit_jax.workdir.description import PARAMS_FILE, write_params

IMAGE = (16, 16, 3)
LAYOUT = {"data": 2, "fsdp": 2, "tensor": 2}


def shallow(kind: str) -> dict[str, Any]:
    """As `small` with one block or stage, for what compiles and asks nothing of depth."""
    one = {"num_layers": 1, "decoder_num_layers": 1}
    return {
        key: value[:1] if isinstance(value, tuple) else one.get(key, value)
        for key, value in small(kind).items()
    }


def config_of(kind: str, **attributes: Any) -> Any:
    sizes = {f"model__{key}": value for key, value in {**shallow(kind), **attributes}.items()}
    rate = {"schedule__learning_rate": 0.1, "schedule__warmup_steps": 1}
    config = tiny.config(**sizes, **rate, optimizer__name="sgd", duration__steps=2)
    config.mesh.update(LAYOUT)
    return config


# DeiT is trained in objectives/test_distillation.py, a masked autoencoder in test_mae.py.
TRAINED = [kind for kind in OF_IMAGES if kind not in ("deit", "mae")]


@pytest.fixture(scope="module", params=TRAINED)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished training of one kind, by the update that is compared with that of one device."""
    folder = tmp_path_factory.mktemp(request.param) / request.param
    train_and_evaluate(config_of(request.param), str(folder))
    return folder


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    return load_model(run)


@pytest.fixture(scope="module", params=OF_IMAGES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training of one kind would leave, with random parameters and several blocks."""
    kind, names = request.param, tuple(map(str, range(10)))
    folder = save_model(tmp_path_factory.mktemp("saved") / kind, class_names=names, **small(kind))
    module = create_model(**small(kind), num_classes=10)
    write_params(folder / PARAMS_FILE, golden.filled(module, (1, *IMAGE)), table_of(module))
    return folder


@pytest.fixture(scope="module")
def loaded(saved: Path) -> Model:
    return load_model(saved)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 256, (20, 24, 3), np.uint8)
        cv2.imwrite(str(folder / f"{i}.png"), pixels)
    return folder


def shapes_of(module: Any, shape: tuple[int, ...] = IMAGE) -> dict[str, Any]:
    """Names and shapes of its parameters, traced once for all tests."""
    return flatten_names(golden.abstract_params(module, (1, *shape)))


def inputs(model: Model) -> np.ndarray:
    shape = (2, *model.description.image_shape)
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


# Training.


# The ViT's is in test_layouts.py, Axial-ViT has its blocks, and BiT those of Axial-ResNet.
OF_OTHERS = ("vit", "axial_vit", "bit")


@pytest.mark.parametrize("kind", [kind for kind in TRAINED if kind not in OF_OTHERS])
def test_eight_devices_update_it_as_one(kind: str) -> None:
    """Two updates by SGD, split over batch, parameters and heads.

    1e-5 where updates are some 1e-2: sums over devices come in another order, and normalisation
    of groups of few numbers enlarges what that changes.
    """
    # All that a form of it adds, at once.
    config = config_of(kind, **(DINOV3 | BEIT if kind == "modern_vit" else {}))
    rng = np.random.default_rng(0)
    host = {
        "image": rng.integers(0, 256, (16, *IMAGE), np.uint8),
        "label": rng.integers(0, 10, 16).astype(np.int32),
        "mask": np.ones(16, np.float32),
    }

    def updated(start: Any = None, **layout: int) -> tuple[Any, Any]:
        mesh = create_mesh(**layout, devices=jax.devices()[: math.prod(layout.values())])
        with jax.set_mesh(mesh):
            run = create_run(config, mesh)
            state, step = run.initial_state(0, start), run.jit_train_step()
            first = jax.device_get(state.params)
            for _ in range(2):
                state, _ = step(state, {}, to_device(host, batch_sharding(mesh), 16))
            return first, jax.device_get(flatten_names(state.params))

    start, eight = updated(**LAYOUT)
    _, one = updated(start, data=1)
    first = flatten_names(start)
    assert any(np.abs(one[name] - first[name]).max() > 1e-3 for name in one)
    for name in one:
        np.testing.assert_allclose(eight[name], one[name], rtol=0, atol=1e-5, err_msg=name)


# What a family says.


@pytest.mark.parametrize("kind", MODELS)
def test_a_file_of_others_tells_what_the_model_is(kind: str) -> None:
    """Shapes alone give the kind and every attribute that shows in one."""
    sizes = small(kind)
    params = shapes_of(create_model(**sizes, num_classes=3), shape_of(kind))
    assert recognise(params) == kind
    inferred = infer_model(params, kind, {})
    assert {**sizes, "num_classes": 3}.items() <= inferred.items()
    assert set(inferred) <= {"name", "num_classes", *MODELS[kind].keys}
    assert create_model(**inferred)


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_stack_and_unstack(kind: str) -> None:
    family = MODELS[kind]
    module = create_model(**small(kind), num_classes=3)
    params = weights.seeded(module, shape_of(kind))
    table = ParameterTable({"a": family})
    tree = {"a": golden.params({k: v.shape for k, v in params.items()}, "r02")}
    stacked = table.stack(tree)
    assert flatten_names(table.unstack(stacked)).keys() == flatten_names(tree).keys()
    blocks = {name for name in params if table_of(kind).find(name).block is not None}
    assert bool(blocks) == bool(family.blocks)
    if "scan" in family.keys:
        scanned = shapes_of(module.clone(scan=True), shape_of(kind))
        assert {f"a/{name}" for name in scanned} == flatten_names(stacked).keys()


@pytest.mark.parametrize("kind", MODELS)
def test_every_intermediate_has_the_compute_dtype(kind: str) -> None:
    """bfloat16 in every layer; parameters, logits and what they are made of stay float32."""
    hybrid = {"resnet_layers": (1,), "classifier": "map", "representation_size": 16}
    model = create_model(
        **small(kind) | (hybrid if kind == "vit" else {}), dtype="bfloat16", num_classes=3
    )
    shape = (64, 64, 3) if kind == "vit" else shape_of(kind)
    params = golden.abstract_params(model, (1, *shape))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}
    inputs = jax.ShapeDtypeStruct((2, *shape), np.float32 if len(shape) == 3 else np.int32)
    apply = functools.partial(model.apply, train=False, capture_intermediates=True)
    _, state = jax.eval_shape(apply, {"params": params}, inputs)
    values = golden.by_module(state["intermediates"])
    last = {"", "head", "head_dist", "pre_logits"}
    last |= {"Transformer/posembed_input"} if kind == "mae" else set()  # constants
    of_float32 = {name for name, value in values.items() if value.dtype == np.float32}
    assert {"", "head"} <= of_float32 <= last
    assert {str(value.dtype) for value in values.values()} == {"float32", "bfloat16"}
    assert len(values) > 20


@pytest.mark.parametrize("kind", MODELS)
def test_every_size_has_its_name(kind: str) -> None:
    for name in VARIANTS_OF[kind]:
        assert VARIANTS[variant_of(VARIANTS[name])] == VARIANTS[name]


@pytest.mark.parametrize("kind", MODELS)
def test_conventions_are_attributes_that_no_shape_tells(kind: str) -> None:
    family = MODELS[kind]
    for key in family.conventions:
        values = [*family.choices.get(key, ())]
        shapes = [
            shapes_of(create_model(**small(kind), num_classes=3, **{key: value}), shape_of(kind))
            for value in values
        ]
        # Of some values; others have parameters of their own, as learned positions.
        assert not shapes or any(a == b for a, b in itertools.combinations(shapes, 2))
    assert {*family.conventions, *family.head_conventions} <= family.keys.keys()


# Its own result, in everything that has a model.


def test_its_own_result_loads(run: Path, model: Model) -> None:
    kind = model.description.model["name"]
    module = create_model(**shallow(kind), num_classes=10)
    assert flatten_names(model.params).keys() == shapes_of(module).keys()
    alone = load_model(run / PARAMS_FILE)
    weights.assert_same(flatten_names(alone.params), flatten_names(model.params))
    # ... also without what was written beside it, by names and shapes.
    bare = run.parent / "bare.npz"
    bare.write_bytes((run / PARAMS_FILE).read_bytes())
    guessed = load_model(bare, image_size=model.description.image_shape[:2])
    assert guessed.module == module
    weights.assert_same(flatten_names(guessed.params), flatten_names(model.params))


def test_it_predicts_and_is_measured(run: Path, photos: Path, capsys: Any) -> None:
    assert predict(str(run), [str(photos)], top=2) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4 * (1 + 2)
    results = evaluate(str(run), dataset="digits", split="test[:40]")
    assert results["num_examples"] == 40
    assert math.isfinite(results["loss"])
    splits = {"train_split": "train[:40]", "split": "test[:40]"}  # of one batch
    probed = probe(str(run), dataset="digits", **splits, kinds=["few_shot"], feature="gap")
    assert any("accuracy" in name for name in probed), probed


def test_its_features(saved: Path, loaded: Model, photos: Path, tmp_path: Path) -> None:
    names = available_features(loaded.module)
    assert {"logits", "gap"} <= set(names)
    shapes = extract_features(
        str(saved), [str(photos)], features=names, output=str(tmp_path / "features.npz")
    )
    assert set(shapes) == set(names)
    with np.load(tmp_path / "features.npz") as features:
        for name in names:
            assert np.isfinite(features[name]).all()
    assert bool(MODELS[loaded.description.model["name"]].blocks) == ("block_0" in names)
    with pytest.raises(UserError, match="this model has no 'block_99'"):
        loaded.features(inputs(loaded), "block_99")


def test_what_is_inside(loaded: Model) -> None:
    shown = can_show(loaded.module)
    has = re.escape(" and ".join(shown) or "no blocks")
    for name in set(INSIDE) - {*shown}:
        with pytest.raises(UserError, match=f"this model has no {name}; it has {has}"):
            loaded.look(inputs(loaded), name)
    inside = loaded.look(inputs(loaded), shown) if shown else {}
    assert inside.keys() == {*shown}
    for array in inside.values():
        assert array.shape[:2] == (loaded.module.num_layers, 2)
    if "attention" in shown:
        np.testing.assert_allclose(inside["attention"].sum(axis=-1), 1.0, atol=1e-5)


def test_pictures_and_page(run, model, photos, tmp_path, caplog, monkeypatch):
    """Which there are. Rendering is no affair of a kind, and takes most of the time."""

    def save(_: Figure, file: Any, **_kwargs: Any) -> None:
        file.touch() if isinstance(file, Path) else file.write("<svg></svg>")

    monkeypatch.setattr(Figure, "savefig", save)
    few = functools.partial(principal_filters, count=2)
    monkeypatch.setattr("vit_jax.inference.analysis.principal_filters", few)
    with caplog.at_level(logging.INFO):
        drawn = visualize(str(run), [str(photos)], output=str(tmp_path), against=str(run))
    names = {path.stem for path in drawn}
    assert "filters" in names
    attends = "attention" in can_show(model.module)
    assert ({"attention_distance", "rollout", "heads"} <= names) == attends
    assert ("No rollout.png: the model has no attention." in caplog.messages) == (not attends)
    assert ("cka" in names) == ("tokens" in can_show(model.module))
    page = write_report(str(run), max_examples=8).read_text()
    assert 'alt="Embedding filters. ' in page
    assert ("Not drawn: the model has no attention" in page) == (not attends)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_each_format_holds_it_or_says_why_not(format, saved, loaded, tmp_path):
    """What is written is read again and compared within; here it is read as a file of others."""
    target = tmp_path / ("a.npz" if format in ("npz", "npz_published", "big_vision") else "a")
    try:
        report = convert_checkpoint(str(saved), str(target), format=format)
    except UserError as error:
        refusal = str(error)
        assert re.search("cannot store model|timm has no", refusal), refusal
        return
    assert report["max_difference"] <= report["tolerance"]
    if format == "orbax":
        return
    for name in ("model.json", "a.json"):
        (tmp_path / name).unlink(missing_ok=True)
        (target / name).unlink(missing_ok=True) if target.is_dir() else None
    heads = getattr(loaded.module, "num_heads", None)
    again = load_model(target, num_heads=heads, image_size=loaded.description.image_shape[:2])
    assert again.description.model["name"] == loaded.description.model["name"]
    assert flatten_names(again.params).keys() == flatten_names(loaded.params).keys()


def test_it_exports(saved: Path, tmp_path: Path) -> None:
    """As ONNX, which has each operation's own translation; StableHLO is JAX's."""
    report = export_model(str(saved), tmp_path / "onnx", format="onnx")
    assert report["max_difference"] <= report["tolerance"]
    assert MODELS[saved.name].title in (tmp_path / "onnx" / "README.md").read_text()


def test_it_is_fine_tuned(saved: Path, loaded: Model) -> None:
    like = golden.abstract_params(create_model(**small(saved.name), num_classes=3), (1, *IMAGE))
    params, report = load_pretrained(saved, like=like, kind=saved.name)
    heads = [n for n in flatten_names(like) if table_of(saved.name).role_of(n) == "head"]
    assert report["reset"] == heads
    tuned = flatten_names(params)
    for name, array in flatten_names(loaded.params).items():
        if name not in heads:
            np.testing.assert_array_equal(tuned[name], array)


@pytest.mark.parametrize("kind", TRAINED)
def test_it_can_be_planned(kind: str) -> None:
    config, topology = config_of(kind), parse_topology("cpu:8")
    plan = make_plan(config, topology, try_remedies=False)
    assert plan.step is not None
    assert plan.model_flops_per_image > 0
    numbered = [row.name for row in plan.rows if "*" in row.name]
    assert bool(numbered) == any("(?P<" in row.pattern for row in MODELS[kind].rows)
    last = list(remedies(config, topology))[-1]
    for key in last:
        section, name = key.split(".")
        assert name in config[section]


def test_another_convention_is_said(saved, loaded, caplog):
    """The same parameters would compute something else."""
    sizes, like = small(saved.name), golden.abstract_params(loaded.module, (1, *IMAGE))
    for key in MODELS[saved.name].conventions:
        stated = getattr(loaded.module, key)
        other = 2 * stated + 1 if isinstance(stated, float) else f"not {stated}"
        caplog.clear()
        load_pretrained(saved, like=like, kind=saved.name, model={**sizes, key: other})
        assert f"--config.model.{key}={stated} matches it" in caplog.text
