"""Our models against the reference implementation's numbers.

Tolerances are the noise that the reference itself shows between one core and two, and against a
float64 implementation, with a margin of about four (ViT, Mixer: 2.7e-6 seen, 1e-5 allowed; hybrids,
whose ReLUs flip near zero: 1.6e-5 seen, 5e-5 allowed).
"""

import functools
import math
import re
import zlib
from typing import Any

import jax
import numpy as np
import pytest

from tests import golden
from vit_jax.models.create import VARIANTS, create_model, family_of
from vit_jax.parameters.table import table_of
from vit_jax.trees import count_parameters, flatten_names, unflatten_names

CONFIGS = list(golden.table("vit_names"))


def by_block(captured: Any, block_name: str) -> Any:
    """Intermediates of a scan, or of a loop, as those of a loop."""
    flat = {}
    for name, value in flatten_names(captured).items():
        head, scanned, tail = name.partition(f"{block_name}/")
        for i in range(len(value)) if scanned else ():
            flat[f"{head}{block_name}_{i}/{tail}"] = value[i]
        if not scanned:
            flat[name] = value
    return unflatten_names(flat)


def atol(config: str) -> float:
    return 5e-5 if config.startswith("R") else 1e-5


def apply(model: Any, params: Any, images: np.ndarray) -> np.ndarray:
    """In the scan form, which compiles faster; the details of ViT-Ti/16 are of the loop."""
    return np.asarray(logits_of(golden.scanned(model))(table_of(model).stack(params), images))


@functools.lru_cache(maxsize=1)  # the recipes of one model come one after the other
def logits_of(model: Any) -> Any:
    return golden.jit(lambda p, x: model.apply({"params": p}, x, train=False))


@functools.lru_cache(maxsize=1)
def numbers_of(model: Any, jit: Any, *, gradients: bool) -> Any:
    """((loss, (logits, intermediates)), gradients or None), from parameters."""
    images, labels = golden.images(2, 224, 224), np.array([3, 7])

    def loss_fn(p: Any) -> Any:
        logits, captured = model.apply(
            {"params": p}, images, train=False, capture_intermediates=True
        )
        log_probs = jax.nn.log_softmax(logits)
        loss = -log_probs[np.arange(2), labels].mean()
        return loss, (logits, captured["intermediates"])

    if gradients:
        return jit(jax.value_and_grad(loss_fn, has_aux=True))
    return jit(lambda params: (loss_fn(params), None))


def test_fill_recipe_is_the_reference_one() -> None:
    checks = golden.table("recipe_check")
    seen = 0
    for key, expected in checks.items():
        if "|" in key and "shape" in expected and not key.startswith("images"):
            name, recipe = key.split("|")
            array = golden.fill(name, tuple(expected["shape"]), recipe)
            np.testing.assert_array_equal(array.ravel()[:4], np.float32(expected["first4"]))
            seen += 1
    assert seen >= 4


@pytest.mark.parametrize("config", CONFIGS)
def test_names_shapes_and_counts(config: str) -> None:
    expected = golden.table("vit_names")[config]
    shapes = golden.shapes(golden.model(config, num_classes=1000))
    assert {name: list(shape) for name, shape in shapes.items()} == expected["params"]
    assert sum(map(math.prod, shapes.values())) == expected["n_params_1000_classes"]


# Mixers have a second look at `fanin` in test_mixer.py.
DETAILS = [key for key in golden.table("vit_detail") if key != "Mixer-B_32|fanin"]
LOGITS = list(golden.arrays("vit_logits"))


# Beside the details: other patch sizes, one head, and a larger model, which takes seconds.
ALONE = [key for key in LOGITS if re.match(r"testing\||ViT-S_(32|16\|)|ViT-B_32\|r02", key)]


@pytest.mark.parametrize("key", ALONE)
def test_logits(key: str) -> None:
    config, recipe = key.split("|")
    model = golden.model(config, num_classes=10)
    params = golden.filled(model, (1, 224, 224, 3), recipe)
    logits = apply(model, params, golden.images(2, 224, 224))
    np.testing.assert_allclose(logits, golden.arrays("vit_logits")[key], rtol=0, atol=atol(config))


def variant(key: str) -> tuple[Any, tuple[int, int], float]:
    """(model, image size, factor on the images) for a key such as `R+Ti_16,161px`."""
    size, *settings = key.split(",")
    kwargs: dict[str, Any] = {"num_classes": 10}
    image_size, factor = (224, 224), 1.0
    for setting in settings:
        if setting in ("gap", "unpooled", "token_unpooled"):
            kwargs["classifier"] = setting
        elif setting.startswith("representation_size="):
            kwargs["representation_size"] = int(setting.partition("=")[2])
        elif setting.startswith("num_classes="):
            kwargs["num_classes"] = int(setting.partition("=")[2])
        elif setting == "img*1e-3":
            factor = 1e-3
        else:
            sides = [int(side) for side in re.findall(r"^(\d+)(?:x(\d+))?", setting)[0] if side]
            image_size = (sides[0], sides[-1])
    name = size.replace("_", "/")
    return create_model(**{**VARIANTS[name], **kwargs}), image_size, factor


# Almost no variance at a large hybrid's root: as at that of a small one, which compiles in no time.
# No model here is without a Transformer; no recipe of the official code's is either. `gap` is that
# of S/32; 70 pixels are the patches of 64 and some left over; without a head, but with a
# representation, shows both.
NOT_HERE = re.compile("R26|Ti_16,(transformer=None|gap|64px|num_classes=0)")
VARIED = [key for key in golden.arrays("vit_variants") if not NOT_HERE.match(key)]


@pytest.mark.parametrize("key", VARIED)
def test_variants(key: str) -> None:
    config, recipe = key.split("|")
    model, image_size, factor = variant(config)
    params = golden.filled(model, (1, *image_size, 3), recipe)
    logits = apply(model, params, golden.images(2, *image_size) * np.float32(factor))
    expected = golden.arrays("vit_variants")[key]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=atol(config))


@pytest.mark.parametrize("key", DETAILS)
def test_logits_intermediates_loss_and_gradients(key: str) -> None:
    config, recipe = key.split("|")
    expected = golden.table("vit_detail")[key]
    model = golden.model(config, num_classes=10)
    params = golden.filled(model, (1, 224, 224, 3), recipe)
    # Through many ReLUs the reference's own gradients differ by percents from one core to two, and
    # there is no rule for a gradient in the ResNet. Of the stem they are compared.
    gradients = not config.startswith("R26")
    # Large ones not as users compile them, which takes longer than the rest; one as a loop.
    jit = golden.jit if config.endswith("Ti_16") else jax.jit
    if config != "ViT-Ti_16":
        model, params = golden.scanned(model), table_of(model).stack(params)
    compute = numbers_of(model, jit, gradients=gradients)
    (loss, (logits, captured)), grads = jax.device_get(compute(params))
    np.testing.assert_allclose(logits, golden.arrays("vit_logits")[key], rtol=0, atol=atol(config))
    assert float(loss) == pytest.approx(expected["loss"], abs=2e-5)

    captured = jax.tree.map(lambda calls: calls[0], captured, is_leaf=lambda x: type(x) is tuple)
    values = golden.by_module(by_block(captured, family_of(model).block_name))
    values["(output)"] = values.pop("")
    assert set(expected["intermediates"]) <= set(values)
    for name, numbers in expected["intermediates"].items():
        value = np.asarray(values[name])
        mean, std = numbers["mean_std"] if isinstance(numbers, dict) else numbers[:2]
        scale = max(abs(std), 1e-3)
        assert value.mean() == pytest.approx(mean, abs=1e-4 * scale), name
        assert value.std() == pytest.approx(std, abs=1e-4 * scale), name
    if gradients:
        check_gradients(flatten_names(table_of(model).unstack(grads)), expected)


def check_gradients(grads: dict[str, Any], expected: dict[str, Any]) -> None:
    """Norms of every leaf, and dot products with known random directions.

    Not of blocks in the middle, which take most of the time: they are like the first and the last.
    """
    total = expected["global_grad_norm"]
    assert set(grads) == set(expected["grads"])
    for name, numbers in expected["grads"].items():
        grad = np.asarray(grads[name], np.float64)
        norm = np.linalg.norm(grad)
        if numbers["norm"] < 1e-5 * total:  # mathematically zero, such as the key's bias
            assert norm < 1e-5 * total, name
            continue
        assert norm == pytest.approx(numbers["norm"], rel=1e-4), name
        if re.search(r"lock_([1-9]|10)/", name):
            continue
        z = np.random.default_rng(zlib.crc32(f"grad/{name}".encode())).standard_normal(grad.shape)
        dot = float(np.sum(grad * z))
        assert dot == pytest.approx(numbers["dot"], abs=3e-4 * numbers["norm"]), name


BIG_VISION = [
    key
    for key in golden.arrays("bv_logits")
    if re.match(r"mu/16,(gap|map),learn(,rep_size=True)?\|", key)
]


@pytest.mark.parametrize("key", BIG_VISION)
def test_big_vision_logits(key: str) -> None:
    """gap and map heads under big_vision's names: only the position embedding stands elsewhere."""
    config, recipe = key.split("|")
    name, pool, _, *options = config.split(",")
    kwargs: dict[str, Any] = {"classifier": pool, "num_classes": 10}
    if options == ["rep_size=True"]:
        kwargs["representation_size"] = VARIANTS[name]["hidden_size"]
    model = create_model(**{**VARIANTS[name], **kwargs})
    posemb = "Transformer/posembed_input/pos_embedding"
    names = golden.shapes(model)
    shapes = {("pos_embedding" if n == posemb else n): shape for n, shape in names.items()}
    params = golden.params(shapes, recipe)
    params["Transformer"]["posembed_input"] = {"pos_embedding": params.pop("pos_embedding")}
    logits = apply(model, params, golden.images(2, 224, 224))
    np.testing.assert_allclose(logits, golden.arrays("bv_logits")[key], rtol=0, atol=1e-5)


# Every size with the head of most parameters; one size with the others.
COUNTED = [key for key in golden.table("bv_param_counts_1000") if re.match("mu|.*map", key)]


@pytest.mark.parametrize("key", COUNTED)
def test_big_vision_counts(key: str) -> None:
    name, pool = key.split(",")
    classifier = {"tok": "token", "gap": "gap", "map": "map"}[pool]
    model = create_model(**VARIANTS[name], num_classes=1000, classifier=classifier)
    # big_vision's class token has no position embedding of its own.
    extra = VARIANTS[name]["hidden_size"] if pool == "tok" else 0
    expected = golden.table("bv_param_counts_1000")[key] + extra
    assert count_parameters(golden.abstract_params(model)) == expected
