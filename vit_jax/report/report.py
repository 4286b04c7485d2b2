"""One page about a training run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.files.atomic import write_atomically
from vit_jax.files.paths import full_path, to_path
from vit_jax.report import sections
from vit_jax.report.facts import Facts, read_facts
from vit_jax.report.inside import inside
from vit_jax.report.page import Html, note, page, section
from vit_jax.report.predictions import predictions
from vit_jax.report.subject import load_subject

OUTPUT = "report.html"


def write_report(workdir: str, *, output: str = "", max_examples: int = 2000) -> Path:
    """Writes a self-contained HTML page about a run, finished or not.

    What the run does not have is said in a sentence in its place.

    Args:
      workdir: of the run, here or at gs://.
      output: file to write; "" is `WORKDIR/report.html`.
      max_examples: of the evaluation data that the model is asked about; 0: none.

    Returns:
      The file.

    Raises:
      UserError: it is no work directory, or one of another version of the code.
    """
    facts = read_facts(workdir)
    try:
        shown, seen = _of_model(facts, max_examples)
        parts = [
            section("results", "Results", sections.results(facts)),
            section("curves", "Curves", sections.curves(facts)),
            section("time", "Where the time went", sections.time(facts)),
            section("predictions", "Predictions", shown),
            section("inside", "Inside the model", seen),
            section("settings", "Settings", sections.settings(facts)),
            section("provenance", "Provenance", sections.provenance(facts)),
        ]
        text = page(full_path(workdir).name, sections.summary(facts), parts)
    except KeyError as error:
        raise UserError(
            f"{workdir} has no {error}: another version of the code has written it."
        ) from error
    path = to_path(output or f"{workdir}/{OUTPUT}")
    write_atomically(path, text)
    return path


def _of_model(facts: Facts, max_examples: int) -> tuple[list[Html], list[Html]]:
    """Predictions, and what is inside; or a sentence that says why not."""
    try:
        subject = load_subject(facts, max_examples)
    except UserError as error:
        return _why_not(error), _why_not(error)
    return _tried(lambda: predictions(facts, subject)), _tried(lambda: inside(subject))


def _tried(content: Callable[[], list[Html]]) -> list[Html]:
    try:
        return content()
    except UserError as error:
        return _why_not(error)


def _why_not(error: UserError) -> list[Html]:
    return [note(f"Not shown. {error}")]
