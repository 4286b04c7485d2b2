"""Zero-shot classifiers beside transformers' CLIP and SigLIP: logits, probabilities, evaluation."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import golden
from tests.peers import import_transformers
from tests.pretrained import weights
from tests.pretrained.test_huggingface_classes import SIZES, TEXT, spread
from vit_jax.data.text import Tokenize
from vit_jax.errors import UserError
from vit_jax.export.convert import convert_checkpoint
from vit_jax.files.paths import write_arrays, write_json
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.load import attributes, load_model
from vit_jax.models.create import create_model
from vit_jax.models.description import Description, Similarity, parts_to_json
from vit_jax.pretrained.formats.stored import similarity

CLASSES = ["cat", "dog", "bee"]
TOKENS = torch.tensor([[3, 1, 4, 8], [5, 2, 6, 8], [7, 7, 5, 8]])  # a text of each class


def their_pair(name: str, folder: Path) -> tuple[Any, Any, np.ndarray]:
    """The saved model, stand-in for our text tower, [B, K] logits of images."""
    transformers = import_transformers()
    text = {**TEXT, "vocab_size": 9, "eos_token_id": 8, "projection_size": SIZES["hidden_size"]}
    projection = {"projection_dim": 10} if name == "CLIP" else {}
    config = getattr(transformers, f"{name}Config")(
        vision_config=SIZES, text_config=text, **projection
    )
    model = getattr(transformers, f"{name}Model")(config).eval()
    spread(model)
    with torch.no_grad():
        model.logit_scale.fill_(np.log(20.0))
        if name == "Siglip":
            model.logit_bias.fill_(-3.0)
        images = torch.from_numpy(golden.images(4, 32, 32).transpose(0, 3, 1, 2).copy())
        output = model(input_ids=TOKENS, pixel_values=images)
    model.save_pretrained(folder)
    embeddings = 5.0 * output.text_embeds.numpy()  # of any length, as a tower returns them
    texts = SimpleNamespace(features=lambda sentences, _: embeddings[: len(sentences)])
    return model, texts, output.logits_per_image.numpy()


@pytest.mark.parametrize(("name", "bias"), [("CLIP", None), ("Siglip", -3.0)])
def test_logits_and_probabilities_of_transformers(
    name: str, bias: float | None, tmp_path: Path
) -> None:
    _, texts, logits = their_pair(name, tmp_path / "theirs")
    tower = load_model(tmp_path / "theirs")
    assert tower.description.similarity is not None
    assert tower.description.similarity.scale == pytest.approx(20.0)
    assert tower.description.similarity.bias == bias
    # The temperature survives in other formats, whose files hold one tower.
    convert_checkpoint(str(tmp_path / "theirs"), str(tmp_path / "ours.npz"), format="npz")
    images = golden.images(4, 32, 32)
    expected = torch.from_numpy(logits)
    expected = expected.softmax(-1) if bias is None else expected.sigmoid()
    assert logits.std() > 0.5
    for source in (tmp_path / "theirs", tmp_path / "ours.npz"):
        model = load_model(source).with_classes(CLASSES, ["a {}"], texts)
        assert "3 outputs" in repr(model)
        # Of a scale of 20: 5e-7 of a cosine.
        np.testing.assert_allclose(model.logits(images), logits, rtol=0, atol=1e-5)
        np.testing.assert_allclose(model.features(images, "logits"), logits, rtol=0, atol=1e-5)
        for row, theirs in zip(model.predict(images, top=3), expected.numpy(), strict=True):
            best = np.argsort(-theirs)
            assert [name for name, _ in row] == [CLASSES[k] for k in best]
            np.testing.assert_allclose([p for _, p in row], theirs[best], rtol=0, atol=1e-5)
    headless = model.without_head() if name == "CLIP" else model
    assert (headless.text_head is None) == (name == "CLIP")


def test_open_clip_and_wrapped_names() -> None:
    def arrays(**values: float) -> dict[str, np.ndarray]:
        return {name: np.float32(value) for name, value in values.items()}

    assert similarity(arrays(logit_scale=0.0, logit_bias=-2.0)) == Similarity(1.0, -2.0)
    wrapped = {"module.logit_scale": np.zeros(1), "params/logit_bias": np.ones((1,))}
    assert similarity(wrapped) == Similarity(1.0, 1.0)
    assert similarity({"params/t": np.zeros(1), "params/b": np.zeros(1)}) == Similarity(1, 0.0)
    # Of Swin's blocks, and a bias alone.
    assert similarity({"blocks.0.attn.logit_scale": np.zeros(1), "b": np.zeros(1)}) is None
    assert similarity({"logit_scale": np.zeros((3, 1, 1))}) is None


def two_towers(folder: Path, **own: float) -> Path:
    """A result of ours with towers of images and texts; `own` are the objective's parameters."""
    image = weights.module_of("mu/8", num_classes=6)
    text = create_model(
        "text-Ti",
        hidden_size=16,
        num_layers=1,
        mlp_dim=16,
        num_heads=2,
        num_classes=6,
        vocab_size=Tokenize().num_tokens,
    )
    arrays = {f"img/{n}": x for n, x in weights.seeded(image, (16, 16, 3)).items()}
    arrays |= {f"txt/{n}": x for n, x in weights.seeded(text, (4,)).items()}
    arrays |= {name: np.full(1, value, np.float32) for name, value in own.items()}
    folder.mkdir()
    write_arrays(folder / "params.npz", arrays)
    tokenize = "tokenize('caption', vocab='characters', length=4)"
    parts = {
        "img": Description(
            attributes(image, "vit"), (16, 16, 3), (2, 2), (), "decode(channels=3)|resize(16)"
        ),
        "txt": Description(attributes(text, "text"), (4,), None, (), tokenize),
    }
    write_json(folder / "model.json", parts_to_json(parts, own))
    return folder


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels]))


def test_evaluate_measures_loss_and_calibration_of_the_pair(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data: Any = {"dataset": "digits", "split": "test[:40]", "prompts": ["a {}"]}
    source = two_towers(tmp_path / "clip", t=float(np.log(4.0)))
    measured = evaluate(str(source), **data)
    image, text = load_model(f"{source}#img"), load_model(f"{source}#txt")
    dataset = image.open_dataset(name="digits", split="test[:40]")
    names = dataset.class_names
    model = image.with_classes(names, ["a {}"], text)
    logits = np.concatenate([part["logits"] for part in model.stream(["logits"], dataset, 16)])
    units = image.features(golden.images(2, 16, 16), "logits")
    units /= np.linalg.norm(units, axis=-1, keepdims=True)
    vectors = text.features([f"a {name}" for name in names], "logits")
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    np.testing.assert_allclose(
        model.logits(golden.images(2, 16, 16)), 4.0 * units @ vectors.T, atol=1e-5
    )
    labels = np.array([int(dataset.source[i]["label"]) for i in range(40)])
    assert measured["loss"] == pytest.approx(cross_entropy(logits, labels), rel=1e-5)
    assert measured["accuracy"] == np.mean(logits.argmax(-1) == labels)
    assert 0.0 <= measured["calibration_error"] <= 1.0

    # SigLIP's bias: a probability for each class.
    source = two_towers(tmp_path / "siglip", t=float(np.log(4.0)), b=-1.0)
    measured = evaluate(str(source), **data)
    signs = 2.0 * np.eye(len(names))[labels] - 1.0
    losses = np.log1p(np.exp(-signs * (logits - 1.0))).sum(-1)
    assert measured["loss"] == pytest.approx(losses.mean(), rel=1e-5)

    # Without a temperature: cosines are ranked, nothing is invented, and a line says so.
    source = two_towers(tmp_path / "neither")
    with caplog.at_level(logging.WARNING):
        ranked = evaluate(str(source), **data)
    assert "has no temperature (logit_scale, or t), so probabilities are not known" in caplog.text
    assert ranked["accuracy"] == np.mean(logits.argmax(-1) == labels)
    assert not {"loss", "calibration_error"} & ranked.keys()
    image, text = load_model(f"{source}#img"), load_model(f"{source}#txt")
    model = image.with_classes(names, ["a {}"], text)
    assert np.abs(model.logits(golden.images(2, 16, 16))).max() <= 1.0
    with pytest.raises(UserError, match="cosines of unknown temperature; use its logits"):
        model.predict(golden.images(2, 16, 16))
    for names in ([], ["cat"]):
        with pytest.raises(
            UserError, match="prompt 'a cat' must contain {} for the class name, or be openai"
        ):
            image.with_classes(names, ["a cat"], text)
