"""What a start of a run writes and says about itself."""

from __future__ import annotations

import csv
import io
import logging
from pathlib import Path
from typing import Any

import jax
from clu import parameter_overview

from vit_jax.errors import counted, list_names
from vit_jax.files.atomic import write_atomically
from vit_jax.files.paths import to_path
from vit_jax.parameters.names import count_parameters
from vit_jax.workdir.description import MODEL_FILE, PARAMETERS_FILE
from vit_jax.workdir.provenance import first_start


def describe(run: Any, workdir: str) -> None:
    """Writes `model.json`, the table of parameters and drawn splits; logs what is to be trained."""
    params = run.abstract_state.params
    if jax.process_index() == 0:
        folder = to_path(workdir)
        run.description.write(folder / MODEL_FILE)
        table = parameter_overview.get_parameter_overview(params, include_stats=False)
        write_atomically(folder / PARAMETERS_FILE, table + "\n")
        _write_splits(run, folder / "splits.csv")
        _warn_of_newer_images(run, workdir)
    size = "x".join(map(str, run.image_shape))
    logging.info(
        f"{workdir}: {counted(count_parameters(params), 'parameter')}, "
        f"{counted(run.objective.num_outputs, 'output')}, "
        f"{counted(run.dataset.num_examples, 'training image')} of {size}, "
        f"{counted(run.total_steps, 'step')} of {run.batch_size}, "
        f"{counted(jax.device_count(), 'device')}."
    )


def _datasets(run: Any) -> list[Any]:
    return [run.dataset, *run.eval_datasets.values()]


def _write_splits(run: Any, path: Path) -> None:
    """Which file is in which split, where the folder does not say."""
    drawn = [each for each in _datasets(run) if getattr(each.source, "drawn", False)]
    if drawn:
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["split", "file"])
        for each in drawn:
            writer.writerows([each.split, name] for name in each.source.relative_paths())
        write_atomically(path, text.getvalue())
        counts = ", ".join(f"{each.split} {each.num_examples}" for each in drawn)
        logging.info("%s has no splits; drawn: %s (see %s).", run.dataset.name, counts, path)


def _warn_of_newer_images(run: Any, workdir: str) -> None:
    """Says which files were written after the run began; their names and sizes are the same."""
    since = first_start(workdir)
    sources = {id(each.source): each.source for each in _datasets(run)}.values()
    for source in sources if since else ():
        newer = source.newer_than(since) if hasattr(source, "newer_than") else []
        if newer:
            logging.warning(
                f"{counted(len(newer), 'image')} newer than this run: {list_names(newer)}. Only "
                "names and sizes are compared; if they show something else now, start anew in "
                "another --workdir."
            )
