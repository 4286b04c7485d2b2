"""Model cards: the weights, their inputs, and the Python that loads them (run by tests).

A card states what is known. It has no date and no local path, so that the same weights
get the same card.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.inference.images import input_range
from vit_jax.inference.model import Model
from vit_jax.models.create import MODELS
from vit_jax.pretrained.fit.adapt import report_text
from vit_jax.pretrained.zoo.resolve import describe_source
from vit_jax.trees import count_parameters

# Libraries that load a format, in Hugging Face's spelling; `cards/` has the Python for each.
LIBRARIES = {"timm": "timm", "huggingface": "transformers", "stablehlo": "jax", "onnx": "onnx"}
_CARDS = Path(__file__).parent / "cards"


def write_card(
    target: Path,
    model: Model,
    format: str,
    check: Mapping[str, Any],
    *,
    facts: Mapping[str, str] | None = None,
    images: jax.ShapeDtypeStruct | None = None,
    output: str = "logits",
) -> None:
    """Writes the card of weights on disk; `images` is their input, if not scaled images."""
    description, library = model.description, LIBRARIES.get(format, "vit_jax")
    batch, dtype = None, np.dtype(np.int32 if model.is_text else np.float32)
    if images is not None:
        batch = images.shape[0] if isinstance(images.shape[0], int) else None
        dtype = np.dtype(images.dtype)
    num_classes = description.model["num_classes"]
    # Without a head of classes (CLIP's is a projection) transformers needs another class; timm's
    # models go without, but it has none for every objective (MAE).
    has_classes = num_classes and description.probabilities_by != "none"
    family = MODELS[description.model["name"]]
    others = {"transformers": True, "timm": family.objective != "classification"}
    is_bare = not has_classes and others.get(library, False)
    python = (_CARDS / f"{'vit_jax' if is_bare else library}.txt").read_text(encoding="utf-8")
    snippet = python.format(
        name=target.name,
        shape=(batch or 1, *description.image_shape),
        torch_shape=(1, *np.roll(description.image_shape, 1).tolist()),
        dtype=dtype.name,
        output=output,
    )
    limit = f"differed from vit_jax by at most {check['tolerance']:.2g} {check['unit']}"
    lines = {**_facts(model, batch, dtype), "Checked": f"read back, it {limit}", **(facts or {})}
    template = (_CARDS / "card.md").read_text(encoding="utf-8")
    card = template.format(
        library=library,
        task="image-classification" if num_classes else "image-feature-extraction",
        name=target.name if target.is_dir() else target.stem,
        kind=family.title,
        format=format,
        snippet=snippet,
        facts="\n".join(f"- {name}: {value}" for name, value in lines.items()),
    )
    path = target / "README.md" if target.is_dir() else target.with_suffix(".md")
    path.write_text(card, encoding="utf-8")


def _facts(model: Model, batch: int | None, dtype: np.dtype[Any]) -> dict[str, str]:
    description, grid = model.description, model.description.grid
    shape = ", ".join(map(str, (batch or "batch", *description.image_shape)))
    pixels = "pixels from 0 to 255, which the model scales itself"
    if model.is_text:
        pixels = "token ids"
    elif dtype != np.uint8:
        ends = [", ".join(f"{x:.4g}" for x in end) for end in input_range(description)]
        pixels = f"black is {ends[0]}, white is {ends[1]}"
    what = "" if model.is_text else " (height, width, channels)"
    count, names = description.model["num_classes"], len(model.class_names)
    named = f"with {names} names in the JSON file" if names else "with unknown names"
    source, entry = Path(model.source), describe_source(model.source)
    published = f"`{entry.name}` at {entry.url}. {entry.note}".rstrip() if entry else "not known"
    return {
        "Input": f"{dtype.name} [{shape}]{what}, {pixels}",
        **({"Grid of tokens or features": "{} x {}".format(*grid)} if grid else {}),
        "Preprocessing": f"`{description.eval_preprocess}`",
        "Classes": f"{count}, {named}" if count else "none: no head",
        "Parameters": f"{count_parameters(model.params):,}",
        **{f"`{k}`": f"`{v}`" for k, v in description.model.items() if v is not None},
        "Made from": f"`{source.name if source.exists() else model.source}`",
        "Published as": published,
        "Published accuracy": "; ".join(map(str, entry.accuracy if entry else ())) or "not known",
        **dict(line.split(": ", 1) for line in report_text(model.report).splitlines()),
    }
