import functools
import logging
import math
import re
from collections import Counter
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from tests import golden
from tests.golden import VIT
from tests.kinds import FORMS, small
from vit_jax.errors import UserError
from vit_jax.models.create import MODELS, VARIANTS, create_model, family_of
from vit_jax.models.positions import POSITION_EMBEDDINGS
from vit_jax.parameters.sharding import (
    MESH_AXES,
    check_batch_size,
    create_mesh,
    parameter_axes,
    parameter_spec,
    state_shardings,
)
from vit_jax.parameters.table import ParameterTable, table_of
from vit_jax.training.optimizer import create_optimizer
from vit_jax.training.step import create_train_state
from vit_jax.trees import flatten_names


def models() -> list:
    """One model per stem; sizes and numbers of blocks change no names, so two of the least do."""
    names = ["Ti/16", "R+Ti/16", "R26+S/32", "ResMLP-S12/16"]
    rows = [{**VARIANTS[name], "num_layers": 2} for name in names]
    extras = [{"representation_size": 64}, {"classifier": "map"}, {"scan": True}]
    extras += [{"head_norm": True}, {"resnet_layers": (1,), "resnet_batch_norm": True}]
    extras += [{"position_embedding": kind} for kind in POSITION_EMBEDDINGS]
    rows += [{**VARIANTS["Ti/16"], "num_layers": 2, "patch_size": 8, **extra} for extra in extras]
    rows += [small(kind) for kind in MODELS]
    rows += [small(f"modern_vit:{form}") for form in FORMS]
    return [create_model(**row, num_classes=10) for row in rows]


def test_every_parameter_of_every_variant_matches_exactly_one_row() -> None:
    used = set()
    for model in models():
        table, towers = table_of(model), ParameterTable({"student": family_of(model)})
        for name, leaf in flatten_names(golden.abstract_params(model)).items():
            assert len(parameter_axes(name, len(leaf.shape), table)) == len(leaf.shape)
            parameter = table.find(name)
            assert parameter.prefix == ""
            used.add(parameter.row)
            below = towers.find(f"student/{name}")
            assert (below.row, below.prefix) == (parameter.row, "student/")
    rows = [row for family in MODELS.values() for row in family.rows]
    # What only a training task adds is in no freshly initialised model.
    unused = {row.pattern for row in rows if row not in used and row.role != "training"}
    assert not unused, "a row that nothing matches"


def test_specs_on_a_mesh() -> None:
    mesh = create_mesh(data=2, fsdp=2, tensor=2)
    block = "Transformer/encoderblock_0"
    query = f"{block}/MultiHeadDotProductAttention_0/query/kernel"
    assert parameter_spec(query, (192, 4, 48), mesh, VIT) == P("fsdp", "tensor", None)
    # 3 heads do not split in two: that axis stays whole, the other does not.
    assert parameter_spec(query, (192, 3, 64), mesh, VIT) == P("fsdp", None, None)
    scanned = query.replace("encoderblock_0", "encoderblock")
    assert parameter_spec(scanned, (12, 192, 4, 48), mesh, VIT) == P(None, "fsdp", "tensor", None)


def abstract_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1) -> AbstractMesh:
    """A mesh of more devices than there are here."""
    return AbstractMesh((data, fsdp, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def test_fsdp_takes_another_dimension_where_it_does_not_divide_its_own() -> None:
    mesh = abstract_mesh(fsdp=256)
    block = "Transformer/encoderblock_0"
    mlp = f"{block}/MlpBlock_0/Dense_0/kernel"
    assert parameter_spec(mlp, (1664, 8192), mesh, VIT) == P(None, "fsdp")  # G/14: 1664 = 13 * 128
    assert parameter_spec(mlp, (1536, 8192), mesh, VIT) == P("fsdp", "tensor")
    # Neither 16 heads nor 104 numbers of each divide by 256.
    query = f"{block}/MultiHeadDotProductAttention_0/query/kernel"
    assert parameter_spec(query, (1664, 16, 104), mesh, VIT) == P(None, "tensor", None)
    # A dimension that `tensor` splits is taken; the layers of the scan form are not split.
    assert parameter_spec(mlp, (1664, 8192), abstract_mesh(fsdp=256, tensor=2), VIT) == P(
        None, "tensor"
    )
    scanned = mlp.replace("encoderblock_0", "encoderblock")
    assert parameter_spec(scanned, (256, 1000, 8), mesh, VIT) == P(None, None, "tensor")
    # The largest of several.
    conv = "block1/unit1/conv2/kernel"
    assert parameter_spec(conv, (3, 3, 512, 100), mesh, VIT) == P(None, None, "fsdp", None)


abstract_params = functools.cache(golden.abstract_params)


def abstract_state(model: Any, **optimizer: Any) -> Any:
    tx = create_optimizer(schedule=lambda _: 0.1, table=VIT, **optimizer)
    params = abstract_params(model)
    return jax.eval_shape(lambda p: create_train_state(p, tx=tx, polyak_decay=0.9), params)


def leaf_specs(state: Any, mesh: Any) -> list[tuple[str, str, tuple[int, ...], P]]:
    """(path, name of the parameter, shape, spec) of every leaf of a state."""
    rows = zip(
        jax.tree_util.tree_leaves_with_path(state),
        jax.tree.leaves(state_shardings(state, mesh, VIT)),
        strict=True,
    )
    return [
        (
            jax.tree_util.keystr(path),
            "/".join(str(e.key) for e in path if isinstance(e, jax.tree_util.DictKey)),
            leaf.shape,
            sharding.spec,
        )
        for (path, leaf), sharding in rows
    ]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "weight_decay": 0.1, "clip_norm": 1.0},
    "sgd": {"name": "sgd", "momentum_dtype": "bfloat16"},
    "adafactor": {"name": "adafactor", "momentum_dtype": "bfloat16", "b2": 0.999},
    "lion": {"name": "lion", "momentum_dtype": "bfloat16"},
    "lamb": {"name": "lamb", "weight_decay": 0.1},
    "muon": {"name": "muon", "momentum_dtype": "bfloat16"},
    "frozen": {"name": "adamw", "freeze": "embedding/.*|.*pos_embedding", "clip_norm": 1.0},
}
SHARDED_MODELS: dict[str, dict[str, Any]] = {
    "B/16 scan": {**VARIANTS["B/16"], "scan": True},
    "G/14": {**VARIANTS["G/14"], "num_layers": 2},
    "R50+B/16": {**VARIANTS["R50+B/16"], "num_layers": 2},
}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("variant", list(SHARDED_MODELS))
def test_nothing_that_could_be_split_is_whole(variant: str, optimizer: str) -> None:
    """Leaf by leaf: parameters, moments, factored moments, averages."""
    model = create_model(**SHARDED_MODELS[variant], num_classes=10)
    state = abstract_state(model, **OPTIMIZERS[optimizer])
    specs = leaf_specs(state, abstract_mesh(fsdp=8))
    params = {name: (shape, spec) for path, name, shape, spec in specs if ".params" in path}
    likes, factored, local_size, size = 0, 0, 0, 0
    for path, name, shape, spec in specs:
        size += math.prod(shape)
        local_size += math.prod(shape) // (8 if "fsdp" in spec else 1)
        if name not in params:
            assert shape in ((), (3,)), path  # counters, coefficients of Newton-Schulz
            continue
        param_shape, param_spec = params[name]
        if shape == param_shape:
            assert spec == param_spec, path
            likes += ".params" not in path
        elif len(shape) == len(param_shape) - 1 and Counter(shape) <= Counter(param_shape):
            # A factored moment lacks one dimension; of the others it keeps what `fsdp` splits.
            factored += 1
            removed = list((Counter(param_shape) - Counter(shape)).elements())
            split = [n for n, axis in zip(param_shape, param_spec, strict=True) if axis == "fsdp"]
            if split and split != removed:
                assert "fsdp" in spec, path
        # Only vectors are whole: biases of heads, MLP and classes, and rows along those.
        if "fsdp" not in spec:
            layers = model.num_layers if "encoderblock/" in name else 1
            assert math.prod(shape) <= model.mlp_dim * layers, path
    assert local_size < (1 / 8 + 0.005) * size
    assert (factored > 0) == (optimizer == "adafactor")
    num_frozen = 3 if optimizer == "frozen" else 0
    copies = {"adamw": 3, "frozen": 3, "sgd": 2, "lion": 2, "lamb": 3}
    if optimizer in copies:  # moments of what is trained, and the average of everything
        assert likes == copies[optimizer] * len(params) - num_frozen * 2


def test_rows_and_columns_of_factored_moments_keep_their_axes() -> None:
    model = create_model(**{**VARIANTS["B/16"], "num_layers": 1}, num_classes=10)
    state = abstract_state(model, **OPTIMIZERS["adafactor"])
    rows = leaf_specs(state, create_mesh(data=2, fsdp=2, tensor=2))
    mlp = "Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel"
    specs = {(shape, spec) for path, name, shape, spec in rows if name == mlp}
    expected = {((768, 3072), P("fsdp", "tensor")), ((768,), P("fsdp")), ((3072,), P("tensor"))}
    assert expected <= specs


def test_what_stays_whole_is_one_line_per_size(caplog: pytest.LogCaptureFixture) -> None:
    """48 blocks of 16 parameters in one line, with what it costs and what to set."""
    model = create_model(**{**VARIANTS["G/14"], "num_layers": 4}, num_classes=10)
    state = abstract_state(model, name="adamw")
    mesh = abstract_mesh(fsdp=256)
    with caplog.at_level(logging.INFO):
        state_shardings(state, mesh, VIT)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "mesh.fsdp=256 does not divide dimension 1664 of" in record.message
    assert "key/kernel (1664, 16, 104)" in record.message
    assert "8 of them are split along another dimension" in record.message  # of 4 MLPs
    assert "mesh.fsdp=128 would divide it." in record.message
    assert re.search("stay whole, [1-9][0-9]% of the parameters on a device", record.message)

    caplog.clear()
    with caplog.at_level(logging.INFO):
        state_shardings(state, abstract_mesh(fsdp=128), VIT)
    assert not caplog.records
    # A head of 10 classes does not split over 4 devices, which costs nothing: no warning.
    with caplog.at_level(logging.INFO):
        state_shardings(state, abstract_mesh(fsdp=4, tensor=4), VIT)
    (record,) = caplog.records
    assert record.levelno == logging.INFO


@pytest.mark.parametrize(
    "sizes", [{"data": 3}, {"data": -1, "fsdp": -1}, {"data": 0}, {"tensor": 16}]
)
def test_a_mesh_that_does_not_fit_is_refused(sizes: dict) -> None:
    with pytest.raises(UserError, match=r"mesh\."):
        create_mesh(**sizes)


def test_the_rest_of_the_devices_goes_to_the_free_axis() -> None:
    assert dict(create_mesh(fsdp=2).shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    assert dict(create_mesh(data=2, fsdp=-1, tensor=2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}


def test_batches_must_divide_over_devices_and_parts() -> None:
    mesh = create_mesh(data=2, fsdp=2, tensor=2)
    check_batch_size("dataset.batch_size", 12, mesh)
    with pytest.raises(UserError, match=r"dataset.batch_size=10 .* use 8 or 12"):
        check_batch_size("dataset.batch_size", 10, mesh)
    with pytest.raises(UserError, match="accumulation_steps = 2"):
        check_batch_size("dataset.batch_size", 12, mesh, accumulation_steps=2)
