"""Loads parameters from a source, in our names or adapted to a model."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.data.class_names import class_names
from vit_jax.data.preprocess import parse
from vit_jax.data.sized import at_size, size_of, spell
from vit_jax.errors import UserError, as_user_error, naming
from vit_jax.files.paths import full_path, local_copy, read_object, reading, to_path
from vit_jax.kinds import check_known
from vit_jax.models.create import MODELS, recognise, variant_defaults
from vit_jax.models.description import OBJECTIVE_PARAMETERS, Description, parts_from_json
from vit_jax.parameters.table import table_of
from vit_jax.pretrained.arrays import read_arrays
from vit_jax.pretrained.formats.stored import (
    FOLDER_FILES,
    TOWERS,
    Stored,
    check_description,
    similarity,
)
from vit_jax.pretrained.zoo.entries import ZooEntry, entry_of_file
from vit_jax.pretrained.zoo.resolve import describe_source, resolve
from vit_jax.trees import flatten_names, unflatten_names
from vit_jax.wording import counted, list_names
from vit_jax.workdir.checkpoints import best_checkpoint, best_text, restore_params
from vit_jax.workdir.description import CHECKPOINTS, CONFIG_FILE, MODEL_FILE, PARAMS_FILE


def load_pretrained(
    source: str | os.PathLike[str],
    *,
    like: Mapping[str, Any],
    kind: str,
    target_grid: tuple[int, int] | None = None,
    grid: tuple[int, int] | None = None,
    num_heads: int | None = None,
    model: Mapping[str, Any] | None = None,
    outputs_of: Callable[[tuple[str, ...], int], np.ndarray] | None = None,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loads published or own weights in the shapes of a model.

    Args:
      source, grid, num_heads: see `read_source`.
      like: parameter tree of a new model, either form of the blocks; arrays or only shapes.
      kind: of that model, a name in `MODELS`.
      target_grid: rows and columns of tokens of that model; None: square.
      model: its attributes, to warn of conventions that differ from the file's.
      outputs_of: (class names of the source, number of its outputs) -> those that a head that is
        kept should have, in their order; None: as they are.
      **options: which adaptations are allowed, see `adapt_params`.

    Returns:
      (nested dict of numpy float32 arrays as in `like`, report), see `adapt_params`.

    Raises:
      UserError: the source does not exist, is unreadable or damaged, or does not fit.
    """
    # Not needed to load a model without changes.
    from vit_jax.pretrained.fit.adapt import adapt_params, report_text
    from vit_jax.pretrained.infer import known_grid, model_sizes

    check_known("kind", kind, MODELS)
    table, family = table_of(kind), MODELS[kind]
    scanned = any(map(table.is_stacked, flatten_names(like)))
    # Loaded arrays only need shapes; reset ones are taken from `like` unchanged.
    flat_like = flatten_names(jax.eval_shape(table.unstack, like))
    flat_like |= {name: leaf for name, leaf in flatten_names(like).items() if name in flat_like}
    default_heads = model_sizes(flat_like, kind).get("num_heads")
    stored = read_source(source, num_heads=num_heads, default_heads=default_heads, grid=grid)
    keeps_head = not options.get("reset_head", True)
    if keeps_head and outputs_of:
        _choose_outputs(stored, outputs_of)
    of_head = family.head_conventions if keeps_head else ()
    _warn_of_conventions(source, stored, model or {}, (*family.conventions, *of_head))
    flat, report = adapt_params(
        stored.params,
        flat_like,
        kinds=(stored.kind, kind),
        grid=target_grid,
        source_grid=grid or known_grid(stored),
        dropped=stored.dropped,
        changed=stored.changed,
        source_posemb=stored.posemb or ("siglip2" if _is_flexible(stored) else ""),
        **options,
    )
    logging.info("%s (%s):\n%s", source, stored.format, report_text(report))
    tree = unflatten_names(flat)
    return (table.stack(tree) if scanned else tree), report


def read_source(
    source: str | os.PathLike[str],
    *,
    num_heads: int | None = None,
    default_heads: int | None = None,
    grid: tuple[int, int] | None = None,
) -> Stored:
    """Reads parameters of any source and format in our names, loop form, float32.

    Args:
      source: a file; a folder of timm, Hugging Face or ours (a work directory means its finished
        `params.npz`, else its newest valid checkpoint; `RUN/best` the best one); or anything
        `resolve` can fetch. Of several models in a file, the first, or the one after a `#`.
      num_heads: of the attention, if it is not in the file (PyTorch's do not have it).
      default_heads: the value if `num_heads`, the file and its sizes do not determine it.
      grid: rows and columns of its tokens, if they are not square and not in the file.

    Raises:
      UserError: the source does not exist, has no weights, is damaged, or is of an unknown model.
    """
    source, part = split_part(source)
    run, _, is_best = os.fspath(source).rpartition("/")
    if is_best == "best" and not to_path(source).exists() and (to_path(run) / CONFIG_FILE).exists():
        source = best_checkpoint(run)
    path, entry = resolve(source), describe_source(source)
    if entry is not None:
        default_heads = entry.model.get("num_heads", default_heads)
    if path.is_dir():
        best, is_earlier = best_text(path)
        if is_earlier:
            logging.warning(best)
        files = (path / name for name in (PARAMS_FILE, *FOLDER_FILES))
        path = next((file for file in files if file.exists()), path)
    if path.is_dir():
        stored = _read_checkpoint(full_path(path), part)
    else:
        ours = _description_of(path, part)
        with local_copy(path) as local:
            part = ours.part if ours else part
            arrays = read_arrays(local, "" if part in TOWERS else part)
            description = ours.description if ours else None
            # Other projects' names may be beside our description, too.
            table = table_of(description.model["name"]) if description else None
            own = ours.split(arrays)[0] if ours else {}
            is_own = bool(own) or path.name not in FOLDER_FILES  # else no name is below its part
            if ours and table and is_own and all(map(table.has, own)):
                stored = _read_own("npz", local, arrays, ours)
            else:
                from vit_jax.pretrained.formats.table import read_weights  # of other projects

                grid = grid or (description.position_grid if description else None)
                heads = {"num_heads": num_heads, "default_heads": default_heads}
                known = {"grid": grid, "part": part, "folder": path.parent}
                stored = read_weights(local, arrays, **known, **heads)
                stored.description = description
    if entry is not None:
        _add_entry(stored, entry)
    elif stored.lacks == "config.json" and (entry := entry_of_file(path.name)):
        with contextlib.suppress(UserError):  # another model of that name
            _add_entry(stored, entry)
            stored.assumed.insert(0, f"by its name the zoo's {entry.name!r}")
    if stored.description is None:
        _log_assumptions(path, stored)
    for name, array in stored.params.items():
        if not np.isfinite(np.sum(array)) and not np.isfinite(array).all():
            raise UserError(f"{source}: {name} has NaN or infinite values; the file is damaged.")
    if stored.unexpected:
        count, names = len(stored.unexpected), list_names(stored.unexpected)
        text = f"{source}: {counted(count, 'unexpected array')}: {names}"
        raise UserError(f"{text}. Detected format: {stored.format}.")
    return stored


def split_part(source: str | os.PathLike[str]) -> tuple[str, str]:
    """`FILE#PART` -> FILE and PART, or ""; a file may have such a name, too."""
    text = os.fspath(source)
    head, _, part = text.rpartition("#")
    has_part = head and part.isidentifier() and not os.path.exists(os.path.expanduser(text))
    return (head, part) if has_part else (text, "")


def _choose_outputs(stored: Stored, outputs_of: Callable[..., np.ndarray]) -> None:
    """Puts those outputs of all heads that are wanted into their order; see `load_pretrained`."""
    rows, params = table_of(stored.kind), stored.params
    heads = [name for name in params if rows.find(name).row.axes[-1:] == ("classes",)]
    for num_outputs in {params[name].shape[-1] for name in heads}:
        outputs = outputs_of((stored.description or stored).class_names, num_outputs)
        for name in () if np.array_equal(outputs, np.arange(num_outputs)) else heads:
            params[name] = params[name][..., outputs]
            stored.changed[name] = "outputs matched by class name"


def _is_flexible(stored: Stored) -> bool:
    """Whether it was trained at several patch sizes, for which positions were interpolated."""
    return stored.description is not None and stored.description.patch_size is not None


class _Ours(NamedTuple):
    """What our `model.json` says of a model in a file."""

    description: Description
    part: str  # the prefix of its parameters
    others: frozenset[str]  # names of parameters that belong to the objective, not to a model

    def split(self, arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """This model's arrays by our names; the names of the others -> what they are."""
        prefix = f"{self.part}/" if self.part else ""
        own, dropped = {}, {}
        for name, array in arrays.items():
            if name in self.others:
                dropped[name] = "of the training objective"
            elif name.startswith(prefix):
                own[name.removeprefix(prefix)] = array
            else:
                dropped[name] = f"not part of {self.part!r}"
        return own, dropped


def _read_own(format: str, path: Path, arrays: Mapping[str, Any], ours: _Ours) -> Stored:
    """One of the models in a file of ours."""
    own, dropped = ours.split(arrays)
    stored = Stored(format, description=ours.description, dropped=dropped)
    stored.similarity = similarity(arrays)
    if not own:
        only = list_names(list(arrays))
        raise UserError(f"{path}: no parameters of {ours.part!r}, only of {only}.")
    with naming(str(path)):
        tree = table_of(stored.kind).unstack(unflatten_names(own))
        for name, array in flatten_names(tree).items():
            stored.add(name, np.asarray(array))
    return stored


def _read_checkpoint(path: Path, part: str) -> Stored:
    """Reads an Orbax checkpoint, or the newest of a work directory."""
    suffixes = (".npz", ".safetensors", ".pth", ".msgpack")
    weights = sorted(file.name for file in path.iterdir() if file.suffix in suffixes)
    if weights and not (path / CHECKPOINTS).is_dir() and not path.name.isdecimal():
        raise UserError(f"{path} is a folder; name one of its files: {list_names(weights)}.")
    if others := sorted(file.name for file in path.iterdir() if file.suffix in (".h5", ".gguf")):
        safe = "which is not supported; download its safetensors file"
        raise UserError(f"{path} holds {list_names(others)} only, {safe}.")
    flat = flatten_names(restore_params(str(path)))
    # A work directory, its folder of checkpoints, or a single checkpoint.
    workdir = next((p.parent for p in (path, path.parent) if p.name == CHECKPOINTS), path)
    ours = _description_of(workdir / PARAMS_FILE, part)
    if ours is None:  # copied without its model.json
        tree = table_of(recognise(flat)).unstack(unflatten_names(flat))
        params = {n: np.asarray(x, np.float32) for n, x in flatten_names(tree).items()}
        return Stored("orbax", params)
    return _read_own("orbax", path, flat, ours)


def _description_of(file: Path, part: str) -> _Ours | None:
    """What is beside a file, NAME.json or `model.json` in our folders; of its first part if ""."""
    in_folder = file.name in (PARAMS_FILE, *FOLDER_FILES)
    path = file.parent / MODEL_FILE if in_folder else file.with_suffix(".json")
    if not path.is_file():
        return None
    try:
        with reading("it"):
            content = read_object(path)
            parts = parts_from_json(content)
            if (chosen := part or next(iter(parts))) in parts:
                others = frozenset(map(str, content.get(OBJECTIVE_PARAMETERS, ())))
                description = check_description(parts[chosen])
                return _Ours(_with_tokenizer(description, path.parent), chosen, others)
    except UserError as error:
        raise as_user_error(f"{path}: {error} Fix or delete it.", error) from error
    known = f"its parts are {list_names(parts)}" if any(parts) else "it describes one model"
    raise UserError(f"{path} has no part {chosen!r}: {known}.")


def _with_tokenizer(description: Description, folder: Path) -> Description:
    """With the vocabulary beside the weights, if that of a text tower is not where it was."""
    spec = description.eval_preprocess
    for op in parse(spec).ops if spec and description.grid is None else ():
        vocab = getattr(op, "vocab", "")
        beside = folder / os.path.basename(vocab)
        if vocab and not to_path(vocab).is_file() and beside.is_file():
            spec = spec.replace(repr(vocab), repr(str(beside)))
    return dataclasses.replace(description, eval_preprocess=spec)


def _log_assumptions(path: Path, stored: Stored) -> None:
    """Logs in one line what was assumed where the settings beside a file say nothing."""
    if stored.lacks and MODELS[stored.kind].input == "image" and not stored.eval_preprocess:
        ops, size = stored.ops or [], stored.image_size
        ops = at_size(ops, own, size) if size and (own := size_of(ops)) else ops
        text = spell(ops) or "official_eval (pixels from -1 to 1)"
        stored.assumed.append(f"images prepared by {text}")
    if stored.assumed:
        said = f"no {stored.lacks} found; guessed" if stored.lacks else "assumed of its images"
        logging.warning("%s: %s: %s.", path, said, ", ".join(stored.assumed))


# Fields of the zoo that were not verified for every entry, beside conventions.
_UNVERIFIED = ("classifier", "representation_size", "num_classes")


def _add_entry(stored: Stored, entry: ZooEntry) -> None:
    """Adds what the zoo knows, first the evaluation preprocessing; UserError for another model."""
    from vit_jax.pretrained.infer import infer_model

    kind, family = stored.kind, MODELS[stored.kind]
    inferred = infer_model(stored.params, kind, stored.conventions)
    unverified = (*_UNVERIFIED, *family.conventions, *family.head_conventions)
    for key, expected in {**variant_defaults(kind), **entry.model}.items():
        value = inferred.get(key, expected)
        is_start = key == "layer_scale_init" and value and expected  # a file does not tell which
        if value == expected or is_start:
            continue
        text = f"the file of {entry.name} has {key}={value}, expected {key}={expected}"
        if key not in unverified:
            raise UserError(f"{text}; it is another one: delete it and download it again.")
        logging.warning(text)
    stored.image_size = stored.image_size or (entry.resolution, entry.resolution)
    stored.eval_preprocess = entry.preprocess or stored.eval_preprocess
    if not stored.class_names and entry.labels:
        stored.class_names = class_names(entry.labels)


def _warn_of_conventions(
    source: Any, stored: Stored, model: Mapping[str, Any], conventions: Iterable[str]
) -> None:
    """Warns of other positions, GELU or epsilon, with which parameters compute something else."""
    known = stored.conventions | (stored.description.model if stored.description else {})
    for key in conventions:
        if key in known and key in model and model[key] != known[key]:
            text = f"{source} was trained with {key}={known[key]} but model.{key}={model[key]}"
            logging.warning(f"{text}; --config.model.{key}={known[key]} matches it.")
