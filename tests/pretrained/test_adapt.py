import functools
from typing import Any

import numpy as np
import pytest

from tests import golden
from vit_jax.errors import UserError
from vit_jax.models.create import MODELS, VARIANTS, create_model, recognise
from vit_jax.models.vit import POSITIONS
from vit_jax.parameters.table import abstract_params
from vit_jax.pretrained.fit.adapt import adapt_params, report_text
from vit_jax.pretrained.infer import infer_model
from vit_jax.trees import flatten_names

Flat = dict[str, np.ndarray]


@functools.cache
def shapes(image: tuple[int, int, int], pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    model = create_model(**{**VARIANTS["mu/16"], "num_classes": 3, **dict(pairs)})
    flat = flatten_names(golden.abstract_params(model, (1, *image)))
    return {name: leaf.shape for name, leaf in flat.items()}


def small(image: tuple[int, int, int] = (32, 32, 3), **kwargs: Any) -> Flat:
    """Flat parameters of a tiny model, no two values alike."""
    names = shapes(image, tuple(kwargs.items()))
    return {name: golden.fill(name, shape, "r02") for name, shape in names.items()}


def distilled(**kwargs: Any) -> Flat:
    """As `small`, with the distillation token and head of DeiT."""
    flat = small(**kwargs)
    before = flat[POSITIONS]
    flat |= {
        "dist": golden.fill("dist", flat["cls"].shape, "r02"),
        "head_dist/kernel": golden.fill("head_dist/kernel", flat["head/kernel"].shape, "r02"),
        "head_dist/bias": golden.fill("head_dist/bias", flat["head/bias"].shape, "r02"),
    }
    flat[POSITIONS] = np.concatenate(
        [before[:, :1], 0 * before[:, :1] + 7.0, before[:, 1:]], axis=1
    )
    return flat


def without(flat: Flat, prefix: str) -> Flat:
    return {name: array for name, array in flat.items() if not name.startswith(prefix)}


def adapt(loaded: Flat, like: Any, **options: Any) -> Any:
    """`adapt_params` for models whose kinds show in the names of their parameters."""
    return adapt_params(loaded, like, kinds=(recognise(loaded), recognise(like)), **options)


def test_several_changes_at_once() -> None:
    """Grey images of another size, other patches, no class token, other classes."""
    loaded = small(representation_size=8)
    like = small((48, 32, 1), patch_size=8, classifier="gap", num_classes=9)
    params, report = adapt(
        loaded,
        like,
        grid=(6, 4),
        posemb="bicubic",
        resize_patches=True,
        channels="sum",
        class_token="drop",
        dropped={"opt/state/step": "optimizer state"},
        changed={"embedding/kernel": "float16 as float32"},
    )
    adapted = report["adapted"]
    assert adapted == {
        POSITIONS: "bicubic 2x2 -> 6x4, position of the class token dropped",
        "embedding/kernel": "float16 as float32, pseudo-inverse resize 16x16 -> 8x8, "
        "sum 3 -> 1 channels",
    }
    assert report["dropped"] == {
        "opt/state/step": "optimizer state",
        "cls": "class token, dropped",
        "head/bias": "pre-training head, reset",
        "head/kernel": "pre-training head, reset",
        "pre_logits/bias": "the model has no pre_logits",
        "pre_logits/kernel": "the model has no pre_logits",
    }
    assert report["reset"] == ["head/bias", "head/kernel"]
    assert list(params) == list(like)
    for name in report["reset"]:
        assert params[name] is like[name]
    for name in report["loaded"]:
        assert params[name] is loaded[name]
    assert {array.dtype for array in params.values()} == {np.dtype(np.float32)}
    assert report_text(report).splitlines() == [
        f"loaded: {len(like) - 4} arrays unchanged",
        f"adapted: embedding/kernel ({adapted['embedding/kernel']}); "
        f"{POSITIONS} ({adapted[POSITIONS]})",
        "reset: head/bias, head/kernel",
        "dropped: opt/state/step (optimizer state); cls (class token, dropped); "
        "head/bias, head/kernel (pre-training head, reset); "
        "pre_logits/kernel, pre_logits/bias (the model has no pre_logits)",
    ]


def test_a_class_token_added_and_dropped_again() -> None:
    loaded, like = small(classifier="gap"), small()
    params, report = adapt(loaded, like, grid=(2, 2), reset_head=False, class_token="add")
    assert report["adapted"] == {
        "cls": "class token added, zero",
        POSITIONS: "zero position of the class token added",
    }
    assert not params["cls"].any()
    assert not params[POSITIONS][:, 0].any()
    np.testing.assert_array_equal(params[POSITIONS][:, 1:], loaded[POSITIONS])
    back, _ = adapt(params, loaded, grid=(2, 2), reset_head=False, class_token="drop")
    assert list(back) == list(loaded)
    for name, array in loaded.items():
        np.testing.assert_array_equal(back[name], array)
    # With another grid wanted, what is interpolated is the grid and nothing else.
    larger, _ = adapt(like, small((48, 48, 3), classifier="gap"), grid=(3, 3), class_token="drop")
    corners = larger[POSITIONS][0, [0, 2, 6, 8]]
    np.testing.assert_array_equal(corners, like[POSITIONS][0, 1:])


def test_distilled_models() -> None:
    loaded = distilled()
    model = shapes((32, 32, 3), (("name", "deit"),))
    assert {name: array.shape for name, array in loaded.items()} == model  # it is what they have
    larger, report = adapt(loaded, distilled(image=(48, 48, 3), num_classes=5), grid=(3, 3))
    heads = {f"{head}/{part}" for head in ("head", "head_dist") for part in ("kernel", "bias")}
    assert set(report["reset"]) == heads
    assert larger["dist"] is loaded["dist"]
    np.testing.assert_array_equal(larger[POSITIONS][:, :2], loaded[POSITIONS][:, :2])

    plain, report = adapt(loaded, small(), grid=(2, 2), reset_head=False, class_token="drop")
    np.testing.assert_array_equal(plain[POSITIONS], small()[POSITIONS])
    assert report["adapted"] == {POSITIONS: "position of the distillation token dropped"}
    assert report["dropped"] == {
        "dist": "distillation token, dropped",
        "head_dist/kernel": "head of the dropped distillation token",
        "head_dist/bias": "head of the dropped distillation token",
    }

    again, report = adapt(plain, distilled(), grid=(2, 2), class_token="add")
    assert report["adapted"]["dist"] == "distillation token added, zero"
    assert not again[POSITIONS][:, 1].any()
    np.testing.assert_array_equal(again[POSITIONS][:, [0, 2, 3, 4, 5]], small()[POSITIONS])


def test_an_encoder_with_positions_of_tokens_becomes_one_of_today() -> None:
    """As MAE is fine-tuned: positions of the patches alone, and the norm after pooling."""
    loaded = small(num_heads=2)
    model = infer_model(loaded, "vit", {})
    model = {key: value for key, value in model.items() if key in MODELS["modern_vit"].keys}
    model |= {"name": "modern_vit", "num_classes": 3, "classifier": "gap", "final_norm": "pooled"}
    like = flatten_names(abstract_params(create_model(**model), (32, 32, 3)))
    params, report = adapt(loaded, like, grid=(2, 2))
    positions = loaded["Transformer/posembed_input/pos_embedding"]
    np.testing.assert_array_equal(params["posembed_patches/pos_embedding"], positions[:, 1:])
    np.testing.assert_array_equal(params["cls"], loaded["cls"] + positions[:, :1])
    norm = ["pooled_norm/bias", "pooled_norm/scale"]
    assert sorted(report["reset"]) == ["head/bias", "head/kernel", *norm]
    assert "Transformer/encoder_norm/scale" in report["dropped"]
    assert not params["head/kernel"].any()  # where timm's models start at random


def error_of(loaded: Flat, like: Any, **kwargs: Any) -> str:
    with pytest.raises(UserError) as error:
        adapt(loaded, like, **{"grid": (2, 2), **kwargs})
    text = str(error.value)
    assert "\n" not in text
    return text


def test_every_problem_is_named_at_once() -> None:
    loaded = small()
    del loaded["embedding/bias"]
    loaded["extra/kernel"] = np.zeros(2)
    loaded["embedding/kernel"] = np.zeros((8, 8, 3, 32))
    assert error_of(loaded, small()) == (
        "the pre-trained parameters do not fit the model: 1 missing (embedding/bias), 1 unexpected "
        "(extra/kernel), 1 of another shape (embedding/kernel is (8, 8, 3, 32) and must be "
        "(16, 16, 3, 32)). To fix: pretrained.resize_patches=True or model.patch_size=8."
    )
    nothing = error_of({}, small())
    assert f"{len(small()) - 2} missing (Transformer/" in nothing
    assert f"and {len(small()) - 6} more)" in nothing
    del loaded["extra/kernel"]
    loaded["embedding/kernel"] = small()["embedding/kernel"]
    assert "check that the file is complete" in error_of(loaded, small())


KEPT, RESET = {"reset_head": False}, {"reset_head": True}
# Sizes of the file and of the model (see `made`), the way out, options, and what fixes it.
MISFITS: dict[str, tuple[Any, ...]] = {
    "patch": (
        {"patch_size": (16, 8), "image": (32, 16, 3)},
        {},
        "pretrained.resize_patches=True or model.patch_size=(16, 8).",
        {},
        {"resize_patches": True},
    ),
    "channels": (
        {"image": (32, 32, 1)},
        {},
        "pretrained.channels=sum, mean or tile, or images of 1 channel (now 3).",
        {},
        {"channels": "tile"},
    ),
    "a class token too many": (
        {},
        {"classifier": "gap"},
        "pretrained.class_token=drop or model.classifier=token (the file has 'cls').",
        {"class_token": "add"},
        {"class_token": "drop"},
    ),
    "no class token": (
        {"classifier": "gap"},
        {},
        "pretrained.class_token=add or model.classifier=gap (the file has no 'cls').",
        {"class_token": "drop"},
        {"class_token": "add"},
    ),
    "other classes": (
        {"num_classes": 7},
        {},
        "pretrained.reset_head=True (head has 7 classes, the model 3).",
        KEPT,
        RESET,
    ),
    # timm drops pre_logits from such a file without a word, and the logits are wrong.
    "a head kept without what it depends on": (
        {"representation_size": 32},
        {},
        "To fix: model.representation_size=32 (now None); pretrained.reset_head=True (the kept "
        "head depends on pre_logits).",
        KEPT,
        RESET,
    ),
    "wider": (
        {"hidden_size": 64, "num_heads": 4},
        {},
        "To fix: model.hidden_size=64 (now 32); model.num_heads=4 (now 2).",
    ),
    "no positions": ({"lacks": POSITIONS}, {}, "model.position_embedding=sincos2d (now learned)."),
    "positions": ({}, {"lacks": POSITIONS}, "model.position_embedding=learned (now sincos2d)."),
}


def made(sizes: dict[str, Any]) -> Flat:
    """Parameters of a tiny model of these sizes, without those that begin with `lacks`."""
    kwargs = {key: value for key, value in sizes.items() if key not in ("distilled", "lacks")}
    flat = distilled(**kwargs) if "distilled" in sizes else small(**kwargs)
    return without(flat, sizes["lacks"]) if "lacks" in sizes else flat


@pytest.mark.parametrize("key", list(MISFITS))
def test_the_fix_is_named_and_works(key: str) -> None:
    file, model, hint, *options = MISFITS[key]
    loaded, like = made(file), made(model)
    assert error_of(loaded, like, **dict(*options[:1])).endswith(hint)
    if options:
        params, _ = adapt(loaded, like, grid=(2, 2), **options[1])
        assert {n: a.shape for n, a in params.items()} == {n: a.shape for n, a in like.items()}


def test_unknown_options_are_named() -> None:
    for option, value, known in (
        ("posemb", "linear", "auto, bilinear, bicubic"),
        ("channels", "max", "sum, mean, tile"),
        ("class_token", "remove", "add, drop"),
    ):
        with pytest.raises(UserError, match=f"pretrained.{option}='{value}' is unknown.*{known}"):
            adapt(small(), small(), grid=(2, 2), **{option: value})
