"""One page about a training run."""

from __future__ import annotations

from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.files.atomic import write_atomically
from vit_jax.files.paths import full_path, to_path
from vit_jax.report import sections
from vit_jax.report.facts import read_facts
from vit_jax.report.inside import model_sections
from vit_jax.report.page import page, section

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
        before, after = (
            [section(key, title, *content(facts)) for key, (title, content) in each.items()]
            for each in (sections.SECTIONS, sections.SECTIONS_AT_THE_END)
        )
        parts = [*before, *model_sections(facts, max_examples), *after]
        text = page(full_path(workdir).name, sections.summary(facts), parts)
    except KeyError as error:
        raise UserError(
            f"{workdir} has no {error}: another version of the code has written it."
        ) from error
    path = to_path(output or f"{workdir}/{OUTPUT}")
    write_atomically(path, text)
    return path
