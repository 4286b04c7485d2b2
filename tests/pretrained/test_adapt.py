import numpy as np

from tests.flat_params import adapt, distilled, shapes, small
from vit_jax.models.create import MODELS, create_model
from vit_jax.models.vit import POSITIONS
from vit_jax.parameters.table import abstract_params
from vit_jax.pretrained.fit.adapt import report_text
from vit_jax.pretrained.infer import infer_model
from vit_jax.trees import flatten_names


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
    )
    adapted = report["adapted"]
    assert adapted == {
        POSITIONS: "bicubic 2x2 -> 6x4, class token and its position dropped",
        "embedding/kernel": "pseudo-inverse resize 16x16 -> 8x8, sum 3 -> 1 channels",
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
        f"adapted: {POSITIONS} ({adapted[POSITIONS]}); "
        f"embedding/kernel ({adapted['embedding/kernel']})",
        "reset: head/bias, head/kernel",
        "dropped: opt/state/step (optimizer state); cls (class token, dropped); "
        "head/bias, head/kernel (pre-training head, reset); "
        "pre_logits/kernel, pre_logits/bias (the model has no pre_logits)",
    ]


def test_what_the_reader_changed_is_reported() -> None:
    name = "embedding/kernel"
    changed = dict.fromkeys((name, "embedding/bias", "head/bias"), "float16 as float32")
    _, report = adapt(
        small(), small((16, 16, 3), patch_size=8), grid=(2, 2), resize_patches=True, changed=changed
    )
    assert report["adapted"] == {
        name: "float16 as float32, pseudo-inverse resize 16x16 -> 8x8",
        "embedding/bias": "float16 as float32",
    }


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


def test_the_class_token_s_position_is_that_of_the_class_token() -> None:
    """Dropped with another grid wanted: what is interpolated is the grid and nothing else."""
    params, _ = adapt(
        small(), small((48, 48, 3), classifier="gap"), grid=(3, 3), class_token="drop"
    )
    grid = small()[POSITIONS][0, 1:]
    np.testing.assert_array_equal(params[POSITIONS][0, [0, 2, 6, 8]], grid)  # its corners


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
    assert report["adapted"] == {POSITIONS: "distillation token and its position dropped"}
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
