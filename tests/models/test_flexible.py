"""FlexiViT: one set of parameters at several patch sizes."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from tests import tiny
from tests.test_train import as_of
from vit_jax.errors import UserError
from vit_jax.export.convert import convert_checkpoint
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model
from vit_jax.models.flexible import at_patch_size
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Task
from vit_jax.parameters.sharding import create_mesh, replicated
from vit_jax.run import create_run
from vit_jax.task import at_patch_size as at_size
from vit_jax.train import train_and_evaluate
from vit_jax.training.step import create_train_state, make_train_step

BLOCK = "Transformer/encoderblock_{}/"
ATTENTION = BLOCK + "MultiHeadDotProductAttention_0/"
# Of big_vision's `models/proj/flexi/vit.py` (width 24, 2 blocks, 3 heads, MLPs of 40), by name.
SHAPES = {
    "Transformer/encoder_norm/bias": (24,),
    "Transformer/encoder_norm/scale": (24,),
    **{
        name.format(i): shape
        for i in range(2)
        for name, shape in {
            **{BLOCK + f"LayerNorm_{k}/{x}": (24,) for k in (0, 1) for x in ("bias", "scale")},
            BLOCK + "MlpBlock_0/Dense_0/bias": (40,),
            BLOCK + "MlpBlock_0/Dense_0/kernel": (24, 40),
            BLOCK + "MlpBlock_0/Dense_1/bias": (24,),
            BLOCK + "MlpBlock_0/Dense_1/kernel": (40, 24),
            ATTENTION + "out/bias": (24,),
            ATTENTION + "out/kernel": (3, 8, 24),
            **{ATTENTION + f"{x}/bias": (3, 8) for x in ("key", "query", "value")},
            **{ATTENTION + f"{x}/kernel": (24, 3, 8) for x in ("key", "query", "value")},
        }.items()
    },
    "cls": (1, 1, 24),
    "embedding/bias": (24,),
    "embedding/kernel": (32, 32, 3, 24),
    "head/bias": (5,),
    "head/kernel": (24, 5),
    "pos_embedding": (1, 49, 24),
}
# Its logits, by patch size, for the arrays and images below (JAX 0.10, TensorFlow 2.21).
LOGITS = {
    48: [
        [2.93748856, -2.27372766, 1.50420296, 3.93265748, -1.89846206],
        [0.55795723, -1.43268955, -1.34615624, 2.52771449, -1.06227565],
    ],
    30: [
        [0.52245909, 2.62049961, -2.93308806, 1.43335462, 0.43803942],
        [1.71567130, 0.33389029, -0.91355687, 1.86340570, -0.52636874],
    ],
    20: [
        [0.67909628, -2.04503989, -0.70856255, 2.98164010, -1.30222726],
        [0.98137456, -1.12148154, -1.13240159, 2.80751157, -0.83801818],
    ],
    16: [
        [1.47382760, -2.11131501, -1.20986831, 2.88142133, -0.58833992],
        [1.19985759, -0.77519214, -1.22629952, 2.73119855, -1.02022886],
    ],
    8: [
        [1.98987889, -1.66541779, -0.43663508, 3.14469123, -2.17141271],
        [1.43090987, -1.04644728, -0.49849039, 3.26452518, -1.94661653],
    ],
}


def images() -> np.ndarray:
    cells = np.random.default_rng(0).uniform(-1, 1, (2, 20, 20, 3))
    return np.kron(cells, np.ones((1, 12, 12, 1))).astype(np.float32)  # 240 pixels


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, arrays = np.random.default_rng(1), {}
    for name in sorted(SHAPES):
        scale = 0.03 if name == "embedding/kernel" else 0.4 if name.endswith("kernel") else 0.5
        array = (rng.standard_normal(SHAPES[name]) * scale).astype(np.float32)
        arrays[name] = 1 + array * np.float32(0.2) if name.endswith("scale") else array
    path = tmp_path_factory.mktemp("flexi") / "flexivit.npz"
    np.savez(path, **arrays)
    return path


def test_logits_of_big_vision(published: Path) -> None:
    own = load_model(published, num_heads=3)
    for size, expected in LOGITS.items():
        # Its pseudo-inverse is of float32 matrices, ours of float64.
        close: Any = {"rtol": 0, "atol": 1e-5 * np.abs(expected).max()}
        loaded = load_model(published, num_heads=3, patch_size=size, image_size=240)
        np.testing.assert_allclose(loaded.logits(images()), expected, **close)
        _, fit = at_patch_size(own.module, (240, 240), size)  # in the update
        same = partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
        jax.tree.map(same, jax.jit(fit)(own.params), loaded.params)


SIZES = (2, 4, 8)


def test_updates_are_those_of_the_drawn_sizes_in_one_program() -> None:
    sizes = {"hidden_size": 8, "num_layers": 1, "mlp_dim": 8, "num_heads": 2}
    model = create_model("vit", num_classes=3, patch_size=4, **sizes)
    objective, rng = Classification(Task.of(model)), np.random.default_rng(0)
    pixels = rng.uniform(-1, 1, (4, 16, 16, 3)).astype(np.float32)
    batch = {"image": pixels, "label": np.array([0, 1, 2, 0]), "mask": np.ones(4, np.float32)}
    choices = {size: at_size(objective, (16, 16), size) for size in SIZES}
    tx, single, compiled = optax.sgd(1.0), {}, []
    mesh = create_mesh(devices=jax.devices()[:1])

    def several(*args: Any) -> Any:
        compiled.append(args)  # when it is traced
        return make_train_step(objective, tx, seed=3, choices=[*choices.values()])(*args)

    with jax.set_mesh(mesh):
        params = model.init(jax.random.key(0), pixels, train=False)["params"]
        state = create_train_state(params, tx=tx, polyak_decay=0.0)
        state = jax.device_put(state, replicated(mesh))
        step, drawn = jax.jit(several), []
        for size, choice in choices.items():
            single[size] = jax.jit(make_train_step(choice, tx, seed=3))
        for _ in range(8):
            new, metrics = step(state, {}, batch)
            drawn.append(int(metrics.pop("patch_size")))
            expected, others = single[drawn[-1]](state, {}, batch)
            jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), new, expected)
            assert metrics["loss"] == pytest.approx(float(others["loss"]), rel=1e-6)
            state = new
    assert {*drawn} == {*SIZES}
    assert len(compiled) == 1


FLEXIBLE = {
    "model__patch_size": 7,
    "train_step__patch_sizes": (8, 4, 16),
    "duration__steps": 6,
    "checkpoint__every_steps": 3,
}


def test_a_run_is_resumed_and_evaluated_at_any_size(tmp_path: Path, script: tiny.Script) -> None:
    """The parameters are for patches of 7 pixels, which do not divide the images of 16."""
    results = train_and_evaluate(tiny.config(**FLEXIBLE), str(tmp_path / "run"))
    copy = as_of(3, tmp_path / "run", tmp_path / "copy")
    train_and_evaluate(tiny.config(**FLEXIBLE), str(copy))
    assert (copy / "params.npz").read_bytes() == (tmp_path / "run/params.npz").read_bytes()
    run = str(tmp_path / "run")
    loaded = load_model(run)  # as in training, at the first of the sizes
    assert (loaded.description.image_shape, loaded.description.grid) == ((16, 16, 3), (2, 2))
    plain = evaluate(run)
    assert plain["accuracy"] == pytest.approx(results["test/accuracy"])
    assert plain["loss"] == pytest.approx(results["test/loss"], rel=1e-5)
    assert (plain["tokens"], evaluate(run, patch_size=4)["tokens"]) == (4, 16)
    tuned = {"pretrained__source": run, "pretrained__resize_patches": True}
    tuned |= {"model__patch_size": 4, "pretrained__reset_head": False, "duration__steps": 1}
    train_and_evaluate(tiny.config(schedule__learning_rate=0.0, **tuned), str(tmp_path / "tuned"))
    same = partial(np.testing.assert_allclose, atol=1e-6)  # positions, too
    tree = load_model(str(tmp_path / "tuned")).params
    jax.tree.map(same, tree, load_model(run, patch_size=4).params)
    teacher = str(tmp_path / "teacher.npz")  # a model of one size, from now on
    convert_checkpoint(run, teacher, format="npz", patch_size=4)
    distilled = {"objective__name": "soft_distillation", "objective__teacher": teacher}
    student = create_run(tiny.config(**FLEXIBLE | distilled), create_mesh())
    jax.eval_shape(student.train_step, *student.step_arguments())
    done = script("patch_sizes.py", run, "--patch_sizes=4,8", f"--output={run}/sizes.png")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(run)]
    assert [row[1:3] for row in rows] == [["4", "16"], ["8", "4"]]
    assert (tmp_path / "run/sizes.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train_step__patch_sizes": (8, 5)}, r"patch_sizes=\(8, 5\): .* does not divide"),
        (
            {"train_step__patch_sizes": (8, 4), "model__position_embedding": "relative"},
            "is for 2x2 tokens, not 4x4",
        ),
        ({"train_step__patch_sizes": (8,), "model__patch_size": 32}, "is larger than the images"),
        (
            {
                "train_step__patch_sizes": (8,),
                "objective__name": "masked_patch",
                "model__classifier": "token_unpooled",
            },
            "this objective is of patches of one size",
        ),
    ],
)
def test_what_has_one_patch_size_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_run(tiny.config(**overrides), create_mesh())


def test_other_models_are_refused_by_name() -> None:
    sizes = {"patch_size": 8, "hidden_size": 16, "num_layers": 1}
    mixer = create_model("mixer", num_classes=3, **sizes, tokens_mlp_dim=8, channels_mlp_dim=8)
    with pytest.raises(UserError, match="is of one patch size; use a Vision Transformer"):
        at_patch_size(mixer, (16, 16), 4)
