"""DINO and iBOT beside the authors' code, and what holds for every loss of their kind.

golden/dino.npz: facebookresearch/dino at 7c446df, its ViT, head, loss and momentum schedule on
seeded weights and crops (2 large, 3 small), in float32. golden/dinov2.npz: facebookresearch/dinov2,
its ViT with LayerScale, head, three losses and both kinds of centering, put together as in its
SSLMetaArch, with masks of 0 to 5 patches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden
from vit_jax.models.create import create_model
from vit_jax.models.views import tokens_function
from vit_jax.objectives import dino
from vit_jax.objectives.dino import STUDENT, TEACHER, Dino
from vit_jax.objectives.ibot import Ibot
from vit_jax.objectives.objective import Task
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.pretrained.load import read_source
from vit_jax.trees import flatten_names, unflatten_names

SIZES = {"patch_size": 4, "hidden_size": 16, "num_layers": 2, "mlp_dim": 32, "num_heads": 2}
HEAD = {"num_prototypes": 32, "head_hidden_size": 24, "head_bottleneck_size": 8}
IMAGE = (16, 16)
# Both in float32: sums of a hundred numbers of order 1 in another order.
SAME = 1e-5


def task(kind="vit", **model):
    sizes = {**SIZES, "gelu": "exact", **model}
    return Task(
        lambda count: create_model(kind, num_classes=count, **sizes),
        image_shape=(*IMAGE, 3),
        tokens_of=lambda module: tokens_function(module, IMAGE),
        total_steps=10,
    )


@pytest.fixture(scope="module")
def theirs():
    return golden.arrays("dino")


def ours(theirs, part, tmp_path):
    """Arrays of theirs below `part/` by our names: backbone and head of a model, or gradients."""
    named = {k.removeprefix(f"{part}/"): v for k, v in theirs.items() if k.startswith(f"{part}/")}
    backbone = {k[9:]: v for k, v in named.items() if k.startswith("backbone.")}
    path = tmp_path / f"{part}.safetensors"
    write_safetensors(path, backbone, {})
    head = {}
    for layer in range(3):
        head[f"Dense_{layer}"] = {
            "kernel": named[f"head.mlp.{2 * layer}.weight"].T,
            "bias": named[f"head.mlp.{2 * layer}.bias"],
        }
    head["prototypes"] = named["head.last_layer.weight_v"].T
    params = read_source(str(path), default_heads=2).params
    if (mask := backbone.get("mask_token")) is not None:  # our loader drops it
        params = {**params, "mask_embedding": mask[None]}
    return params, head


def state(theirs, tmp_path, objective):
    """All that the objective reads, with their numbers."""
    params, buffers = {}, {"updates": jnp.float32(3.0), "center": theirs["center"][0]}
    for who, tree in ((STUDENT, params), (TEACHER, buffers)):
        backbone, head = ours(theirs, who, tmp_path)
        tree |= {who: unflatten_names(backbone), f"{who}_head": head}
    names = flatten_names({**params, **buffers})
    assert set(names) - set(flatten_names(backbone_names(names))) <= set(objective.own_parameters)
    return params, buffers


def backbone_names(names):
    return {name: 0 for name in names if name.partition("/")[0] in (STUDENT, TEACHER)}


def batch_of(theirs):
    crops = [theirs[f"crop_{i}"] for i in range(5)]
    local = np.stack(crops[2:], axis=1)
    mask = np.ones(len(crops[0]), np.float32)
    return {"image": crops[0], "image_2": crops[1], "local": local, "mask": mask}


KEY = jax.random.key(0)


def test_an_update_is_that_of_the_authors_code(theirs, tmp_path):
    objective = Dino(task(), **HEAD, teacher_momentum=0.9, teacher_temperature=0.07)
    params, buffers = state(theirs, tmp_path, objective)

    def loss_of(params):
        return objective.loss({**params, **buffers}, batch_of(theirs), KEY)

    (loss, metrics), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
    assert abs(loss - theirs["loss"]) < SAME
    backbone, head = ours(theirs, "grad", tmp_path)
    expected = flatten_names({STUDENT: unflatten_names(backbone), f"{STUDENT}_head": head})
    grads = flatten_names(grads)
    assert grads.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(grads[name], array, atol=SAME, err_msg=name)
    # With a rate of 0.1, then the teacher and the center.
    stepped = jax.tree.map(lambda p, g: p - 0.1 * g, flatten_names(params), expected)
    new = objective.update(buffers, unflatten_names(stepped), metrics["buffers"])
    backbone, head = ours(theirs, "new_teacher", tmp_path)
    expected = flatten_names({TEACHER: unflatten_names(backbone), f"{TEACHER}_head": head})
    for name, array in flatten_names(new).items():
        if name in expected:
            np.testing.assert_allclose(array, expected.pop(name), atol=SAME, err_msg=name)
    assert not expected
    np.testing.assert_allclose(new["center"], theirs["new_center"][0], atol=SAME)
    assert new["updates"] == 4.0


@pytest.fixture(scope="module")
def newer():
    return golden.arrays("dinov2")


def ibot_loss(theirs, tmp_path, **keys):
    """(params -> loss, metrics), and the parameters."""
    layer_scale = {"layer_scale_init": 0.5, "gelu": "exact"}
    objective = Ibot(
        task("modern_vit", **layer_scale),
        **HEAD,
        teacher_temperature=0.07,
        koleo_weight=0.1,
        **keys,
    )
    params, buffers = {}, {}
    for who, tree in ((STUDENT, params), (TEACHER, buffers)):
        backbone, head = ours(theirs, who, tmp_path)
        tree |= {who: unflatten_names(backbone), f"{who}_head": head}
    zeros = jnp.zeros(HEAD["num_prototypes"])
    buffers |= {"updates": jnp.float32(0.0), "center": zeros, "patch_center": zeros}
    batch = {**batch_of(theirs), "masked_patches": theirs["masked_patches"]}
    return lambda params: objective.loss({**params, **buffers}, batch, KEY), params


@pytest.mark.parametrize("centering", dino.CENTERINGS)
def test_losses_are_those_of_dinov2(centering, newer, tmp_path):
    loss_of, params = ibot_loss(newer, tmp_path, centering=centering)
    (loss, metrics), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
    names = ("dino_loss", "koleo_loss", "patch_loss")
    total, *parts = newer[f"{centering}/losses"]
    np.testing.assert_allclose([metrics[name] for name in names], parts, rtol=0, atol=SAME)
    assert abs(loss - total) < SAME
    if centering == "mean":
        for name in ("center", "patch_center"):
            seen = 0.1 * metrics["buffers"][name]  # from zero, with momentum 0.9
            np.testing.assert_allclose(seen, newer[f"mean/{name}"], atol=SAME)
        return
    backbone, head = ours(newer, "grad", tmp_path)
    # Their class token has a position of its own, which we add to it: one gradient for both.
    backbone = {**backbone, "cls": newer["grad/backbone.cls_token"]}
    expected = flatten_names({STUDENT: unflatten_names(backbone), f"{STUDENT}_head": head})
    grads = flatten_names(grads)
    assert grads.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(grads[name], array, atol=SAME, err_msg=name)
