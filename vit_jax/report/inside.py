"""Figure 7 of the paper for this model, and attention rollout."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from vit_jax.analysis.pictures import draw_distances
from vit_jax.errors import UserError, counted, import_extra
from vit_jax.inference.visualize import head_distances, of_images, of_parameters, spread
from vit_jax.report.page import Html, details, note, picture, table, tag
from vit_jax.report.subject import Subject

_LOOKED_AT = 32  # images of the attention distance
_BATCH = 8
_DPI = 100
# Of each picture: its title, what it shows to those who do not see it, how to read it.
_PICTURES = {
    "filters": (
        "Embedding filters",
        "A grid of small patches: the principal components of the embedding filters.",
        "Each in a range of its own; below it the share of the variance that it explains.",
    ),
    "positions": (
        "Position embeddings",
        "A grid of maps, one for each of some places, brightest where embeddings are alike.",
        "Of each place the similarity of its embedding with those of all places.",
    ),
    "attention_distance": (
        "Mean attention distance",
        "A dot for each head over the blocks; the table below has the numbers.",
        "How far each head looks, and (dashed) one that looks everywhere alike.",
    ),
    "rollout": (
        "Attention rollout",
        "Evaluation images, each beside itself below a map of the attention that reaches it.",
        "What the output sees of evaluation images: bright is more.",
    ),
}


def inside(subject: Subject) -> list[Html]:
    """The pictures that the model has; those of images only where there are examples.

    Raises:
      UserError: matplotlib is not installed.
    """
    import_extra("A picture of the model", "matplotlib", "embedded")
    drawings, numbers = of_parameters(subject.model), list[Html]()
    if isinstance(subject.examples, UserError):
        reason = str(subject.examples).rstrip(".")
        drawings |= dict.fromkeys(("attention_distance", "rollout"), lambda: reason)
    else:
        few = spread(range(len(subject.examples.names)), _LOOKED_AT)
        images = subject.examples.images(few)
        names = [subject.examples.names[i] for i in few]
        drawings |= of_images(subject.model, images, names, _BATCH)
        if subject.model.module.num_layers:
            distances, uniform = head_distances(subject.model, images, _BATCH)
            drawings["attention_distance"] = lambda: draw_distances(distances, uniform)
            numbers = _distances(distances, len(images))
    content: list[Html] = []
    for name, (title, alt, caption) in _PICTURES.items():
        figure = drawings[name]()
        content.append(tag("h3", title))
        if isinstance(figure, str):
            content.append(note(f"Not drawn: {figure}."))
        else:
            kind = "jpeg" if name == "rollout" else "png"  # photos would be a megabyte
            data = _file(figure, kind)
            content.append(picture(data, kind=kind, alt=alt, caption=caption))
        content += numbers if name == "attention_distance" else []
    return content


def _distances(distances: np.ndarray, num_images: int) -> list[Html]:
    """The numbers [L, H] behind the picture."""
    columns = ["block", *(f"head {i}" for i in range(1, distances.shape[1] + 1))]
    rows = [(block, *(f"{x:.1f}" for x in row)) for block, row in enumerate(distances, start=1)]
    label = f"Mean attention distance in pixels, over {counted(num_images, 'image')}"
    return [
        details("Numbers", note(f"{label}."), table(columns, rows, label=label, kind="numbers"))
    ]


def _file(figure: Any, kind: str) -> bytes:
    with io.BytesIO() as file:
        figure.savefig(file, format=kind, dpi=_DPI)
        return file.getvalue()
