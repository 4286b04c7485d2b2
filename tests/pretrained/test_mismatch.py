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


KEPT = {"reset_head": False}
HYBRID = {"resnet_layers": (), "patch_size": 4}
STAGES = {"resnet_layers": (1, 2), "patch_size": 2}
# Sizes of the file and of the model (see `made`), the way out, and options.
MISFITS: dict[str, tuple[Any, ...]] = {
    "patch": (
        {"patch_size": (16, 8), "image": (32, 16, 3)},
        {},
        "pretrained.resize_patches=True or model.patch_size=(16, 8).",
    ),
    "channels": (
        {"image": (32, 32, 1)},
        {},
        "pretrained.channels=sum, mean or tile, or images of 1 channel (now 3).",
    ),
    "channels of a hybrid": (
        HYBRID,
        {"image": (32, 32, 6), **HYBRID},
        "pretrained.channels=sum, mean or tile, or images of 3 channels (now 6).",
    ),
    "a class token too many": (
        {},
        {"classifier": "gap"},
        "pretrained.class_token=drop or model.classifier=token (the file has 'cls').",
        {"class_token": "add"},
    ),
    "no class token": (
        {"classifier": "gap"},
        {},
        "pretrained.class_token=add or model.classifier=gap (the file has no 'cls').",
        {"class_token": "drop"},
    ),
    "a distillation token too many": (
        {"distilled": True},
        {},
        "pretrained.class_token=drop or model.name=deit (the file has 'dist').",
    ),
    "other classes": (
        {"num_classes": 7},
        {},
        "pretrained.reset_head=True (head has 7 classes, the model 3).",
        KEPT,
    ),
    "no head": ({"num_classes": 0}, {}, "pretrained.reset_head=True (the file has no head).", KEPT),
    "no head of a distilled model": (
        {"distilled": True, "lacks": "head_dist/"},
        {"distilled": True},
        "pretrained.reset_head=True (the file has no head_dist).",
        KEPT,
    ),
    "wider": (
        {"hidden_size": 64, "num_heads": 4},
        {},
        "To fix: model.hidden_size=64 (now 32); model.num_heads=4 (now 2).",
    ),
    "hybrid": (
        STAGES,
        {"patch_size": 2, "image": (4, 4, 3)},
        "model.resnet_layers=(1, 2) (now None).",
    ),
    "stages": (
        {**STAGES, "resnet_width_factor": 2},
        {"resnet_layers": (1, 1), "patch_size": 2},
        "model.resnet_layers=(1, 2) (now (1, 1)); model.resnet_width_factor=2 (now 1).",
    ),
    "map": (
        {"classifier": "map"},
        {"classifier": "gap"},
        "To fix: model.classifier=map (now gap).",
    ),
    "no representation": (
        {},
        {"representation_size": 8},
        "To fix: model.representation_size=None (now 8).",
    ),
    # timm drops pre_logits from such a file without a word, and the logits are wrong.
    "a head kept without what it depends on": (
        {"representation_size": 32},
        {},
        "To fix: model.representation_size=32 (now None); pretrained.reset_head=True (the kept "
        "head depends on pre_logits).",
        KEPT,
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
def test_the_fix_is_named(key: str) -> None:
    loaded, like, hint, *options = MISFITS[key]
    assert error_of(made(loaded), made(like), **dict(*options)).endswith(hint)


def test_the_fixes_work() -> None:
    """What the messages above advise does load."""
    for key, options in {
        "patch": {"resize_patches": True},
        "channels": {"channels": "tile"},
        "channels of a hybrid": {"channels": "mean"},
        "a class token too many": {"class_token": "drop"},
        "no class token": {"class_token": "add"},
        "a distillation token too many": {"class_token": "drop"},
        "other classes": {"reset_head": True},
        "no head": {"reset_head": True},
        "no head of a distilled model": {"reset_head": True},
        "a head kept without what it depends on": {"reset_head": True},
    }.items():
        loaded, like = (made(sizes) for sizes in MISFITS[key][:2])
        params, report = adapt(loaded, like, grid=(2, 2), **options)
        assert {n: a.shape for n, a in params.items()} == {n: a.shape for n, a in like.items()}
        assert sorted([*report["loaded"], *report["adapted"], *report["reset"]]) == sorted(like)


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("posemb", "linear", r"pretrained.posemb='linear' is unknown.*bilinear, bicubic"),
        ("channels", "max", r"pretrained.channels='max' is unknown.*sum, mean, tile"),
        ("class_token", "remove", r"pretrained.class_token='remove' is unknown.*add, drop"),
    ],
)
def test_unknown_options_are_named(option: str, value: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        adapt(small(), small(), grid=(2, 2), **{option: value})
