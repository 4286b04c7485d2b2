"""Preprocessing as text: the grammar, what named pipelines stand for, and mistakes in it."""

import pickle

import numpy as np
import pytest

from benchmarks.input import write_photographs
from vit_jax.data import preprocess
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError


def test_every_op_can_be_written_and_pickled():
    arguments = {
        "resize": "4, 5, method='area'",
        "resize_small": "4",
        "central_crop": "4",
        "corner_crop": "4",
        "random_crop": "4, 5",
        "inception_crop": "(4, 5)",
        "random_resized_crop": "(4, 5)",
        "gaussian_blur": "0.5",
        "grayscale": "0.5",
        "solarize": "0.5",
        "normalize": "0.5, std=(1, 2, 3)",
        "dino_crops": "16, 8, 2",
        "block_masks": "(4, 5)",
        "patchify": "(9, 16), 4",
    }
    for name, op in preprocess.OPS.items():
        chain = parse(f"{name}({arguments.get(name, '')})")
        assert type(chain.ops[0]) is op
        assert pickle.loads(pickle.dumps(chain)) == chain


@pytest.mark.parametrize(
    ("named", "ops"),
    [
        ("official_train(224)|value_range", "decode|inception_crop(224)|flip_lr|value_range"),
        ("official_eval(224)", "decode|resize(224, 224)"),
        ("official_eval((32, 64), exif=False)", "decode(exif=False)|resize(32, 64)"),
        ("big_vision_eval(224, resize=256)", "decode|resize_small(256)|central_crop(224)"),
        (
            "timm_eval(224)",
            "decode|resize_small(248, 'pillow_bicubic', 'down')"
            "|central_crop(224, rounding='nearest')",
        ),
        (
            "deit_eval(384, exif=False)",
            "decode(exif=False)|resize_small(438, 'pillow_bicubic', 'down')"
            "|central_crop(384, rounding='nearest')"
            "|normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))",
        ),
        ("huggingface_eval((32, 64))", "decode|resize(32, 64, 'pillow_bilinear')"),
        (
            "huggingface_eval(8, mean=0, std=(1, 1, 1))",
            "decode|resize(8, 8, 'pillow_bilinear')|normalize(0.0, (1.0, 1.0, 1.0))",
        ),
    ],
)
def test_what_named_pipelines_stand_for(named, ops):
    assert parse(named) == parse(ops)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("decod|flip_lr", r"unknown op 'decod'. Did you mean 'decode'\? Known: decode, resize"),
        ("resize()", r"missing a required argument: 'height' \(arguments: resize\(height, width="),
        ("resize(4, widht=5)", r"unknown argument 'widht'\. Did you mean 'width'\? \(arguments:"),
        ("resize(4.5)", "height=4.5 is not int"),
        ("inception_crop(8, area=(0.5, 2))", r"area=\(0.5, 2.0\) must be .* <= 1"),
        ("decode(channels=2)", "channels=2 must be one of 1, 3"),
        ("resize(1000000000)", "height=1000000000 must be from 1 to 8192 pixels"),
        ("resize(4, method='a|b')", r"method='a\|b' must be one of bilinear"),
        (
            "randaug(2, 21)",
            r"magnitude=21.0\) must have 1 to 100 layers and a magnitude in \[0, 20",
        ),
        ("randaug(101)", r"must have 1 to 100 layers"),
        (f"resize({'-' * 3000}1)", "recursion"),
        (f"decode{'.a' * 1000}", "recursion"),
        (f"decode{'()' * 1000}", "recursion"),
        (f"timm_eval({'9' * 400})", r"size=9{40} is not below 2\^31"),
        ("decode|value_range(-1e999, 1)", r"low=-inf is not below 2\^31"),
        ("decode|random_affine(scale=(1, 1e300))", r"scale=1e\+300 is not below 2\^31"),
        ("decode({[]: 1})", "arguments must be literals"),
        ("decode\udcff", "surrogates not allowed"),
        ("random_affine(degrees=-1)", "degrees=-1.0.* must have degrees, translate and shear >= 0"),
        ("resize(size)", r"'resize\(size\)': arguments must be literals"),
        ("os['system']('x')", "is not a name"),
        ("", "invalid syntax; expected e.g."),
        ("official_eval(0)", r"preprocess 'decode.*resize\(0, 0\)': .* must be from 1 to 8192"),
        ("timm_eval(224, 1.1)", r"crop_pct=1.1 must be in \(0, 1\] \(arguments: timm_eval\(size,"),
        ("timm_eval(224, method='cubic')", "'pillow_cubic' must be one of bilinear, area"),
    ],
)
def test_mistakes_are_named(spec, message):
    with pytest.raises(UserError, match=message) as caught:
        parse(spec)
    assert repr(spec) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reduced_decoding_is_as_close_as_the_docs_say(tmp_path):
    """The mean difference; crops without antialiasing keep noise that a reduced image has not."""
    write_photographs(tmp_path, 40)
    for crop, bound in (("inception_crop", 12), ("random_resized_crop", 6)):
        changed = []
        for seed, path in enumerate(sorted(tmp_path.rglob("*.jpg"))):
            example = {"image": path.read_bytes()}
            exact, reduced = (
                parse(f"{decode}|{crop}(64)|flip_lr")(example, np.random.default_rng(seed))["image"]
                for decode in ("decode", "decode(reduced=True)")
            )
            changed.append(np.abs(exact.astype(int) - reduced).mean())
        assert 0 < np.mean(changed) < bound
        assert 10 < np.count_nonzero(changed) < 40  # not where the box is small


def test_reduced_decoding_is_for_random_boxes():
    with pytest.raises(UserError, match=r"a random crop must follow decode\(reduced=True\)"):
        parse("decode(reduced=True)|resize(8, 8)")
    assert parse("official_train(8, reduced=True)").ops[0].reduced


def test_a_chain_has_a_bound():
    with pytest.raises(UserError, match=r"'(flip_lr\|){10}'... has more than 4,096 characters"):
        parse("|".join(["flip_lr"] * 100_000))
    assert len(parse("|".join(["decode", *["flip_lr"] * 99])).ops) == 100
