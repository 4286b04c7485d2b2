"""DINO and iBOT beside the authors' code, and what holds for every loss of their kind.

golden/dino.npz: facebookresearch/dino at 7c446df, its ViT, head, loss and momentum schedule on
seeded weights and crops (2 large, 3 small), in float32. golden/dinov2.npz: facebookresearch/dinov2
at b8931f7, its ViT with LayerScale, head, three losses and both kinds of centering, put together
as in its SSLMetaArch, with masks of 0 to 5 patches.
"""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import dino as recipe
from tests import golden, tiny
from tests.saved_models import save_model
from tests.test_train import as_of, assert_same_params
from vit_jax.data.pipeline import to_device
from vit_jax.errors import UserError
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model, get_variant
from vit_jax.models.flops import jaxpr_flops
from vit_jax.models.views import tokens_function
from vit_jax.objectives import dino
from vit_jax.objectives.dino import STUDENT, TEACHER, Dino
from vit_jax.objectives.ibot import Ibot, gram_loss
from vit_jax.objectives.objective import Task
from vit_jax.parameters.sharding import batch_sharding, create_mesh
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.pretrained.load import read_source
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate
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
        tokens_of=lambda module, **options: tokens_function(module, IMAGE, **options),
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


def config_of(name, **overrides):
    """A tiny run on crops of 16 and 8 pixels; iBOT with all that DINOv2 adds."""
    crops = "decode|resize(20)|dino_crops(16, 8, 2, photometric=False)"
    config = tiny.config(
        objective__name=name,
        model__patch_size=4,
        dataset__preprocess=crops if name == "dino" else f"{crops}|block_masks(4)",
        evaluators__test__name="nearest_neighbors",
        evaluators__test__train_split="train[:50]",
        **overrides,
    )
    config.objective.update(**HEAD, warmup_teacher_steps=4, frozen_prototypes_steps=2)
    if name == "ibot":
        config.objective.update(centering="sinkhorn_knopp", koleo_weight=0.1, separate_head=True)
        config.objective.update(gram_weight=2.0, gram_every_steps=3)  # and what DINOv3 does
    return config


def test_the_loss_of_grams_is_that_of_the_authors_code():
    """dinov3/loss/gram_loss.py of images, normalized, with negative similarities."""
    rng = np.random.default_rng(0)
    student, anchor = (rng.standard_normal((4, 9, 8)).astype(np.float32) + 0.5 for _ in range(2))
    assert np.mean(gram_loss(student, anchor)) == pytest.approx(0.157668695, rel=1e-6)


def test_the_anchor_is_the_teacher_of_every_third_update():
    with jax.set_mesh(mesh := create_mesh(devices=jax.devices()[:1])):
        objective = create_run(config_of("ibot"), mesh).objective
    params = {"student": {"x": jnp.ones(2)}}
    buffers, anchors = objective.start_buffers(params), []
    for step in range(1, 7):
        buffers = objective.update(buffers, {"student": {"x": jnp.full(2, 10.0 * step)}}, {})
        anchors.append((buffers["gram_teacher"]["x"][0], buffers["teacher"]["x"][0]))
    assert [anchor for anchor, _ in anchors[:2]] == [1.0, 1.0]
    assert all(anchor == anchors[2][1] for anchor, _ in anchors[2:5])
    assert anchors[5][0] == anchors[5][1]


def test_a_run_is_resumed_to_the_bit_and_its_teacher_is_the_result(tmp_path):
    config = config_of("ibot", checkpoint__every_steps=4, model__stochastic_depth_rate=0.2)
    results = train_and_evaluate(config, str(tmp_path / "whole"))
    assert 0 <= results["test/accuracy"] <= 1
    parts = as_of(4, tmp_path / "whole", tmp_path / "parts")
    train_and_evaluate(config, str(parts))
    assert_same_params(tmp_path / "whole", parts)
    images = np.zeros((1, 16, 16, 3), np.float32)
    default, teacher, student = (
        load_model(f"{parts}{part}").features(images) for part in ("", "#teacher", "#student")
    )
    np.testing.assert_array_equal(default, teacher)
    assert np.abs(teacher - student).max() > 0
    tuned = tiny.config(model__patch_size=4, pretrained__source=str(parts))
    loaded = flatten_names(create_run(tuned, create_mesh()).start.load())
    positions = "Transformer/posembed_input/pos_embedding"
    np.testing.assert_array_equal(
        loaded[positions], flatten_names(load_model(parts).params)[positions]
    )


def test_devices_and_parts_of_a_batch_make_the_same_update():
    """KoLeo and the equal use of prototypes are of the whole batch."""
    rng = np.random.default_rng(0)

    def pixels(*shape):
        return rng.integers(0, 256, (16, *shape, 3), np.uint8)

    host = {"image": pixels(16, 16), "image_2": pixels(16, 16), "local": pixels(2, 8, 8)}
    host["mask"] = np.ones(16, np.float32)
    numbers = rng.permuted(np.tile(np.arange(16, dtype=np.int32), (16, 2, 1)), axis=2)[..., :8]
    host["masked_patches"] = np.where(rng.random(numbers.shape) < 0.5, numbers, -1)

    def updated(start=None, parts=1, **layout):
        devices = jax.devices()[: math.prod(layout.values())]
        config = config_of("ibot", optimizer__name="sgd", schedule__learning_rate=0.1)
        config.optimizer.clip_norm = 1.0
        config.train_step.accumulation_steps = parts
        with jax.set_mesh(mesh := create_mesh(**layout, devices=devices)):
            run = create_run(config, mesh)
            state = run.initial_state(0, start)
            first, update = jax.device_get(state.params), run.jit_train_step()
            for _ in range(2):
                batch = to_device(host, batch_sharding(mesh), 16)
                state, metrics = update(state, {}, batch)
            return first, jax.device_get((state.params, state.buffers)), jax.device_get(metrics)

    params, one, expected = updated(data=1)
    assert expected["grad_norm"] > 0
    # Sums over devices and parts come in another order.
    _, other, metrics = updated(params, parts=2, data=2, fsdp=2, tensor=2)
    for key, value in metrics.items():
        np.testing.assert_allclose(value, expected[key], rtol=SAME, atol=SAME, err_msg=key)
    for mine, theirs in zip(other, one, strict=True):
        for key, array in flatten_names(mine).items():
            np.testing.assert_allclose(array, flatten_names(theirs)[key], atol=SAME)


def test_the_arithmetic_of_all_crops_is_counted():
    """The teacher's without a backward pass: about what the update multiplies, written out."""
    with jax.set_mesh(mesh := create_mesh(devices=jax.devices()[:1])):
        run = create_run(config_of("ibot"), mesh)
        executed = jaxpr_flops(run.jit_train_step().trace(*run.step_arguments()).jaxpr.jaxpr)
    counted = run.train_flops_per_image() * run.batch_size
    assert 0.9 * counted < executed <= counted  # without the gradient of the pixels


def test_frozen_prototypes_have_no_gradient_and_the_temperature_warms_up():
    keys = {"teacher_temperature": 0.07, "warmup_teacher_temperature": 0.04}
    objective = Dino(task(), **HEAD, frozen_prototypes_steps=2, warmup_teacher_steps=4, **keys)
    batch = {"image": np.zeros((4, 16, 16, 3), np.float32), "mask": np.ones(4, np.float32)}
    params = jax.jit(objective.init)(KEY, batch)
    buffers = objective.start_buffers(params)
    x = jax.random.normal(KEY, (4, 5, 16))
    embeddings = {STUDENT: {"head": x}, TEACHER: {"head": x[:, :2] + 1.0}}

    @jax.jit
    def run(step):
        def loss_of(head):
            now = {**params, **buffers, "updates": step, "student_head": head}
            return objective.loss_of(now, embeddings, batch)

        return jax.grad(loss_of, has_aux=True)(params["student_head"])

    entropies = []
    for step in range(6):
        grads, metrics = run(jnp.float32(step))
        assert (np.abs(grads["prototypes"]).max() > 0) == (step >= 2)
        assert np.abs(grads["Dense_0"]["kernel"]).max() > 0
        entropies.append(metrics["teacher_entropy"])
    assert np.all(np.diff(entropies[:5]) > 0)  # less sharp
    assert entropies[5] == entropies[4]


def test_a_collapse_is_reported_once(caplog):
    objective = Dino(task(), **HEAD)
    row = {"teacher_information": 0.01, "feature_std": 0.02}
    with caplog.at_level(logging.WARNING):
        objective.watch(10, row)  # nothing is learned yet
        objective.watch(1000, {**row, "teacher_information": 2.0})
        assert not caplog.records
        for step in (1100, 1200):
            objective.watch(step, row)
    [record] = caplog.records
    assert "step 1100: the teacher gives all images the same answer" in record.message


@pytest.mark.parametrize(
    ("argument", "form", "crops"),
    [
        ("S/16,pictures", "dino", "dino_crops(224, 96)"),
        ("S/16,pictures,112,ibot", "ibot", "dino_crops(112, 48)|block_masks(7)"),
        (
            "DINOv2-S/14,pictures,dinov2,knn",
            "ibot",
            "dino_crops(224, 84, area=(0.32, 1), local_area=(0.05, 0.32))|block_masks(16)",
        ),
    ],
)
def test_the_recipe(argument, form, crops):
    config = recipe.get_config(argument)
    assert config.objective.name == form
    assert config.dataset.preprocess == f"decode|{crops}"
    assert list(config.evaluators) == ["test"] * argument.endswith("knn")
    assert config.objective.warmup_teacher_steps == 6000
    is_newest = "dinov2" in argument
    assert config.objective.koleo_weight == (0.1 if is_newest else 0.0)
    assert config.objective.centering == ("sinkhorn_knopp" if is_newest else "mean")


def test_the_recipe_continues_from_weights(tmp_path):
    sizes = {"hidden_size": 16, "num_layers": 1, "mlp_dim": 16, "num_heads": 2}
    source = save_model(tmp_path / "source", patch_size=8, **sizes)
    config = recipe.get_config(f"{source},digits,32,dinov2,knn")
    assert config.pretrained.source == str(source)
    assert config.schedule.learning_rate == pytest.approx(2.5e-5)
    config.objective.update(**HEAD)
    config.duration.steps, config.schedule.warmup_steps = 2, 1
    config.dataset.update(split="train[:64]", batch_size=16)
    config.dataset.preprocess = config.dataset.preprocess.replace("(32, 8", "(32, 8, 2")
    config.evaluators.test.update(split="test[:20]", train_split="train[:50]", every_steps=0)
    assert 0 <= train_and_evaluate(config, str(tmp_path / "run"))["test/accuracy"] <= 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"objective__centering": "median"}, "objective.centering='median'"),
        ({"objective__teacher_temperature": 0.0}, "objective.teacher_temperature=0.0"),
        ({"objective__teacher_momentum": 1.5}, "objective.teacher_momentum=1.5"),
        ({"model__position_embedding": "relative"}, "images and patches must be of one size"),
        ({"dataset__preprocess": "decode|resize(16)"}, "'image_2'.*preprocess can add it"),
    ],
)
def test_what_does_not_fit_is_one_line(overrides, words, tmp_path):
    config = config_of("dino")
    for key, value in overrides.items():
        section, name = key.split("__")
        config[section][name] = value
    with pytest.raises(UserError, match=words) as error:
        train_and_evaluate(config, str(tmp_path / "run"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (Ibot, "Mixer-S/8", "MLP-Mixer.* cannot be masked"),
        (Ibot, "MAE-B/16", "cannot be masked"),
        (Dino, "Mixer-S/8", "is for 2x2 tokens, .* must be of one size"),
        (Dino, "R50x1", "has no tokens of patches"),
    ],
)
def test_models_that_cannot_see_the_views(kind, name, words):
    sizes = {**get_variant(name), "num_classes": 0}
    build = Task(
        lambda _: create_model(**sizes),
        tokens_of=lambda module, **options: tokens_function(module, IMAGE, **options),
    )
    if "patch_size" in sizes:
        sizes["patch_size"] = 8
    batch = {"image": np.zeros((1, *IMAGE, 3), np.float32)}
    batch |= {"image_2": batch["image"], "local": batch["image"][:, None, :8, :8]}

    def see():
        objective = kind(build, **HEAD)
        params = jax.eval_shape(objective.init, KEY, batch)
        return jax.eval_shape(objective.embed, {**params, TEACHER: params[STUDENT]}, batch, KEY)

    with pytest.raises(UserError, match=words):
        see()
