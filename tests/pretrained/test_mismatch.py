from typing import Any

import numpy as np
import pytest

from tests.flat_params import Flat, adapt, distilled, small, without
from vit_jax.errors import UserError
from vit_jax.models.vit import POSITIONS


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
STAGES = {"resnet_layers": (1, 2), "patch_size": 2}
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
    "a distillation token too many": (
        {"distilled": True},
        {},
        "pretrained.class_token=drop or model.name=deit (the file has 'dist').",
        {},
        {"class_token": "drop"},
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
    "stages": (
        {**STAGES, "resnet_width_factor": 2},
        {"resnet_layers": (1, 1), "patch_size": 2},
        "model.resnet_layers=(1, 2) (now (1, 1)); model.resnet_width_factor=2 (now 1).",
    ),
    "map": ({"classifier": "map"}, {"classifier": "gap"}, "model.classifier=map (now gap)."),
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
        ("posemb", "linear", "bilinear, bicubic"),
        ("channels", "max", "sum, mean, tile"),
        ("class_token", "remove", "add, drop"),
    ):
        with pytest.raises(UserError, match=f"pretrained.{option}='{value}' is unknown.*{known}"):
            adapt(small(), small(), grid=(2, 2), **{option: value})
