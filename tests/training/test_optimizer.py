from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import golden
from tests.golden import VIT
from vit_jax.errors import UserError
from vit_jax.models.create import VARIANTS, create_model
from vit_jax.parameters.groups import decay_factors
from vit_jax.training.optimizer import create_optimizer
from vit_jax.training.schedule import SCHEDULES, Schedule, create_schedule, to_steps
from vit_jax.trees import flatten_names, unflatten_names


@pytest.mark.parametrize("row", golden.table("lr_schedule"), ids=lambda row: str(row)[:60])
def test_schedules_of_the_official_code(row: dict) -> None:
    own = {"linear_end": row["linear_end"]} if row["decay_type"] == "linear" else {}
    schedule = create_schedule(
        row["decay_type"],
        learning_rate=row["base"],
        total_steps=row["total_steps"],
        warmup_steps=row["warmup_steps"],
        **own,
    )
    rates = [float(schedule(step)) for step in row["steps"]]
    # float32 noise of a cosine near pi, relative to the base.
    np.testing.assert_allclose(rates, row["lr"], rtol=2e-6, atol=1e-7 * row["base"])


@pytest.mark.parametrize("name", SCHEDULES)
def test_start_end_of_warmup_and_last_step(name: str) -> None:
    own = {"linear_end": 0.5} if name == "linear" else {}
    schedule = create_schedule(name, learning_rate=2.0, total_steps=100, warmup_steps=10, **own)
    assert float(schedule(0)) == 0.0
    assert float(schedule(10)) == pytest.approx(2.0)
    last = {"cosine": 0.0, "linear": 0.5, "rsqrt": 2.0 / np.sqrt(1 + 90 / 10_000), "constant": 2.0}
    last["staircase"] = 0.002
    assert float(schedule(100)) == pytest.approx(last[name], abs=1e-6)


def test_rsqrt_halves_after_three_timescales_and_cools_down_to_zero() -> None:
    schedule = create_schedule(
        "rsqrt",
        learning_rate=1.0,
        total_steps=1000,
        warmup_steps=100,
        timescale_steps=100,
        cooldown_steps=50,
    )
    assert float(schedule(400)) == pytest.approx(0.5)
    assert float(schedule(1000)) == 0.0
    assert float(schedule(975)) == pytest.approx(0.5 / np.sqrt(1 + 875 / 100))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("cosin", {}, "Did you mean 'cosine'"),
        ("cosine", {"warmup_steps": -1, "cooldown_steps": 1}, "warmup_steps=-1"),
        ("rsqrt", {"warmup_steps": 50, "cooldown_steps": -50}, "cooldown_steps=-50"),
    ],
)
def test_schedule_mistakes_are_named(name: str, kwargs: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_schedule(name, learning_rate=1.0, total_steps=100, **kwargs)


@pytest.mark.parametrize(
    ("total", "warmup", "cooldown", "reached", "said"),
    [
        (400, 200, 0, 200, ""),
        (390, 200, 0, 39, "warmup_steps=200: too long for 390 steps; using 39."),
        (100, 200, 0, 10, "warmup_steps=200: too long for 100 steps; using 10."),
        (9, 200, 0, 0, "warmup_steps=200: too long for 9 steps; using none."),
        (100, 20, 50, 20, ""),
        (100, 20, 80, 10, "cooldown_steps=80: too long for 100 steps; using 10 and 10."),
        (100, 0, 100, 0, "schedule.cooldown_steps=100: too long for 100 steps; using 10."),
    ],
)
def test_a_short_training_reaches_its_rate(
    total: int, warmup: int, cooldown: int, reached: int, said: str, caplog
) -> None:
    caplog.set_level("INFO")
    steps = {"total_steps": total, "warmup_steps": warmup, "cooldown_steps": cooldown}
    schedule = create_schedule("constant", learning_rate=2.0, **steps)
    assert float(schedule(reached)) == 2.0
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_units_of_a_duration() -> None:
    sizes = {"num_examples": 1_281_167, "batch_size": 4096}
    assert to_steps(steps=7, **sizes) == 7
    assert to_steps(examples=40960, **sizes) == 10
    assert to_steps(epochs=300.0, **sizes) == 93_835  # paper: ImageNet, 300 epochs
    assert to_steps(epochs=90.0, num_examples=14_197_122, batch_size=4096) == 311_948


def test_steps_win_so_that_a_command_line_can_shorten_a_recipe() -> None:
    assert to_steps(steps=5, epochs=90.0, num_examples=100, batch_size=10) == 5
    assert to_steps(examples=50, epochs=90.0, num_examples=100, batch_size=10) == 5


@pytest.mark.parametrize("duration", [{}, {"steps": 0}, {"epochs": 0.01}])
def test_nothing_to_do_is_refused(duration: dict) -> None:
    with pytest.raises(UserError, match="duration"):
        to_steps(**duration, num_examples=100, batch_size=10)


def test_exactly_these_parameters_decay() -> None:
    row = {**VARIANTS["Ti/16"], "num_layers": 1, "representation_size": 8}
    params = golden.abstract_params(create_model(**row, num_classes=3))
    mask = flatten_names(decay_factors(params, r".*/kernel", (), VIT))
    block = "Transformer/encoderblock_0"
    assert {name for name, decays in mask.items() if decays} == {
        "embedding/kernel",
        *(f"{block}/MultiHeadDotProductAttention_0/{x}/kernel" for x in ("query", "key", "value")),
        f"{block}/MultiHeadDotProductAttention_0/out/kernel",
        f"{block}/MlpBlock_0/Dense_0/kernel",
        f"{block}/MlpBlock_0/Dense_1/kernel",
        "pre_logits/kernel",
        "head/kernel",
    }
    assert len(mask) == 26


PARAMS = {"head": {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full((2,), 3.0)}}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)


def one_update(name: str, grads: dict, **kwargs: object) -> dict:
    tx = create_optimizer(name, table=VIT, schedule=lambda _: jnp.float32(0.1), **kwargs)

    @jax.jit
    def update(params: Any, grads: Any) -> Any:
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    return update(PARAMS, grads)


def test_decay_is_decoupled_times_the_learning_rate_and_spares_biases() -> None:
    # With zero gradients Adam does nothing, so what is left is rate * decay * parameter.
    after = one_update("adamw", ZEROS, weight_decay=0.5)
    np.testing.assert_allclose(after["head"]["kernel"], 3.0 - 0.1 * 0.5 * 3.0)
    np.testing.assert_array_equal(after["head"]["bias"], 3.0)
    after = one_update("adamw", ZEROS, weight_decay=0.5, decay_parameters="all")
    np.testing.assert_allclose(after["head"]["bias"], 3.0 - 0.1 * 0.5 * 3.0)


def test_decay_that_rises_as_in_dino() -> None:
    """The decay before each of four updates is what its code returns for (0.04, 0.4, 1, 4)."""
    schedule = Schedule(lambda _: jnp.float32(0.1), total_steps=4, warmup_steps=0)
    options = {"weight_decay": 0.04, "final_weight_decay": 0.4}
    tx = create_optimizer("adamw", table=VIT, schedule=schedule, **options)
    state = tx.init(PARAMS)
    for expected in (0.04, 0.09272078, 0.22, 0.34727922):
        updates, state = jax.jit(tx.update)(ZEROS, state, PARAMS)
        np.testing.assert_allclose(updates["head"]["kernel"], -0.1 * expected * 3.0, rtol=1e-6)


def test_clipping_comes_before_momentum() -> None:
    grads = jax.tree.map(lambda p: jnp.full_like(p, 100.0), PARAMS)
    after = one_update("sgd", grads, clip_norm=1.0)
    norm = optax.tree.norm(jax.tree.map(jnp.subtract, PARAMS, after))
    assert float(norm) == pytest.approx(0.1, rel=1e-5)


def test_momentum_dtype_reaches_the_state() -> None:
    for name in ("sgd", "adamw", "lion", "lamb", "lars"):
        for dtype in ("float32", "bfloat16"):
            tx = create_optimizer(name, table=VIT, schedule=lambda _: 0.1, momentum_dtype=dtype)
            dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(tx.init(PARAMS))}
            assert ("bfloat16" in dtypes) == (dtype == "bfloat16"), (name, dtype)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("adam", {}, "Did you mean 'adamw'"),
        ("adamw", {"decay_parameters": "kernel"}, "Did you mean 'kernels'"),
        ("sgd", {"momentum_dtype": "float16"}, "Did you mean"),
        ("lamb", {"adapted_parameters": "kernel"}, "Did you mean 'kernels'"),
        ("adamw", {"decay_multipliers": (("head/kernel", 2.0),)}, "it is 0"),
    ],
)
def test_optimizer_mistakes_are_named(name: str, kwargs: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_optimizer(name, table=VIT, schedule=lambda _: 0.1, **kwargs)


BLOCK = "Transformer/encoderblock_"
SHAPES = {
    f"{BLOCK}{block}/{name}": shape
    for block in range(2)
    for name, shape in {
        "MultiHeadDotProductAttention_0/query/kernel": (6, 2, 3),
        "MultiHeadDotProductAttention_0/out/kernel": (2, 3, 6),
        "MlpBlock_0/Dense_0/kernel": (6, 9),
        "MlpBlock_0/Dense_0/bias": (9,),
    }.items()
} | {"embedding/kernel": (2, 2, 3, 6), "head/kernel": (6, 4)}


def draw(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    # Blocks of different norms, or they could be scaled together.
    return unflatten_names(
        {
            name: np.float32(rng.normal(size=shape) * (5.0 if f"{BLOCK}1" in name else 1.0))
            for name, shape in SHAPES.items()
        }
    )


def two_updates(tx: optax.GradientTransformation, form: Any) -> dict[str, Any]:
    """Of parameters in a form; the result in the loop form."""

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = form(draw(0))
    state = tx.init(params)
    for seed in (1, 2):
        params, state = update(params, state, form(draw(seed)))
    return flatten_names(VIT.unstack(params))


def optax_lars(learning_rate: Any, weight_decay: float) -> optax.GradientTransformation:
    """As in MAE's and MoCo v3's code: the rate is not part of the momentum."""
    kernels = unflatten_names({name: name.endswith("kernel") for name in SHAPES})
    return optax.chain(
        optax.add_decayed_weights(weight_decay),
        optax.masked(optax.scale_by_trust_ratio(trust_coefficient=0.001), kernels),
        optax.sgd(learning_rate, momentum=0.9),
    )


def optax_lamb_of_kernels(learning_rate: Any, weight_decay: float) -> optax.GradientTransformation:
    """As timm's, with which DeiT III trains: kernels alone are adapted."""
    kernels = unflatten_names({name: name.endswith("kernel") for name in SHAPES})
    return optax.chain(
        optax.scale_by_adam(eps=1e-6),
        optax.add_decayed_weights(weight_decay),
        optax.masked(optax.scale_by_trust_ratio(), kernels),
        optax.scale_by_learning_rate(learning_rate),
    )


def optax_muon(**kwargs: Any) -> optax.GradientTransformation:
    """Its matrices told by hand."""
    axes = {"query": (0, (1, 2)), "out": ((0, 1), 2), "Dense_0": (0, 1)}
    matrices = {
        name: optax.contrib.MuonDimensionNumbers(*axes[name.split("/")[-2]])
        if name.startswith(BLOCK) and name.endswith("kernel")
        else None
        for name in SHAPES
    }
    return optax.contrib.muon(
        muon_weight_dimension_numbers=lambda _: unflatten_names(matrices),
        consistent_rms=0.2,
        **kwargs,
    )


@pytest.mark.parametrize(
    ("name", "own", "of_optax"),
    [
        ("lion", {}, optax.lion),
        ("lamb", {}, optax.lamb),
        ("lamb", {"adapted_parameters": "kernels"}, optax_lamb_of_kernels),
        ("lars", {}, optax_lars),
        ("muon", {}, optax_muon),
    ],
)
def test_updates_are_those_of_optax_and_the_scan_form_is_like_the_loop_form(name, own, of_optax):
    schedule = optax.linear_schedule(0.1, 0.05, 2)
    kwargs: Any = {"schedule": schedule, "weight_decay": 0.3, "decay_parameters": "all", **own}
    tx = create_optimizer(name, table=VIT, **kwargs)
    kwargs = {"learning_rate": schedule, "weight_decay": 0.3}
    expected = two_updates(of_optax(**kwargs), lambda tree: tree)
    if name == "muon":  # its Adam is Nesterov's
        adam = two_updates(optax.adamw(**kwargs), lambda tree: tree)
        expected |= {key: adam[key] for key in SHAPES if BLOCK not in key or "bias" in key}
    for form in (lambda tree: tree, VIT.stack):
        for key, value in two_updates(tx, form).items():
            # Five iterations of products of float32 matrices.
            np.testing.assert_allclose(value, expected[key], rtol=2e-5, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("name", ["adafactor", "lion", "lamb", "lars", "muon"])
def test_rates_of_layers_scale_what_any_optimizer_does_and_frozen_ones_stay(name: str) -> None:
    kwargs = {"table": VIT, "schedule": lambda _: jnp.float32(0.1), "weight_decay": 0.03}
    start, grads = draw(0), draw(1)

    def moved(**more: Any) -> dict[str, Any]:
        tx = create_optimizer(name, **kwargs, **more)
        return flatten_names(jax.jit(lambda g: tx.update(g, tx.init(start), start)[0])(grads))

    plain, both = moved(), moved(freeze=f"{BLOCK}0/.*", layer_decay=0.5)
    for key, value in both.items():
        factor = 0.0 if f"{BLOCK}0" in key else 0.5 if f"{BLOCK}1" in key else None
        factor = {"embedding/kernel": 0.125, "head/kernel": 1.0}.get(key, factor)
        np.testing.assert_allclose(value, factor * plain[key], rtol=1e-5, atol=1e-7, err_msg=key)


def test_muon_without_a_matrix_is_refused() -> None:
    with pytest.raises(UserError, match="finds no kernel in a block; use 'adamw'"):
        create_optimizer("muon", table=VIT, schedule=lambda _: 0.1).init(PARAMS)
