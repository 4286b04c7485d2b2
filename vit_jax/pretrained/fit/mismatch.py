"""What does not fit between a file and a model, and the keys that fix it, as one line."""

from typing import Any

from vit_jax.models.create import MODELS
from vit_jax.models.family import Shapes, axis_of, patch_size_of
from vit_jax.parameters.table import table_of
from vit_jax.pretrained.infer import missing_sizes, model_sizes, num_tokens
from vit_jax.wording import counted, list_names

Kinds = tuple[str, str]  # names in `MODELS`: of the file's model, and of the one to fill


def describe_mismatch(arrays: Shapes, like: Shapes, original: Shapes, kinds: Kinds) -> str:
    """What does not fit, and how to fix it; "" if all fits. `original`: before adapting."""
    problems = {
        "missing": [name for name in like if name not in arrays],
        "unexpected": [name for name in arrays if name not in like],
        "of another shape": [
            f"{name} is {tuple(original[name].shape)} and must be {tuple(like[name].shape)}"
            for name in like
            if name in arrays and tuple(arrays[name].shape) != tuple(like[name].shape)
        ],
    }
    texts = (f"{len(n)} {kind} ({list_names(n)})" for kind, n in problems.items() if n)
    if not (text := ", ".join(texts)):
        return ""
    if MODELS[kinds[0]].blocks != MODELS[kinds[1]].blocks:
        hints = [f"model.name={kinds[0]}, as in the file, with its sizes"]
    else:
        hints = _option_hints(arrays, like, kinds)
        known = " ".join(hints)
        hints += [x for x in _size_hints(arrays, like, kinds) if x.partition("=")[0] not in known]
    hints = hints or ["check that the file is complete and matches the model (model.*)"]
    return f"the pre-trained parameters do not fit the model: {text}. To fix: {'; '.join(hints)}."


def _option_hints(arrays: Shapes, like: Shapes, kinds: Kinds) -> list[str]:
    """Hints about what `pretrained.*` can adapt."""
    hints = []
    theirs, ours = map(table_of, kinds)
    for name in ours.with_role("patches", like):
        size, now = patch_size_of(arrays, name), patch_size_of(like, name)
        if size and now and size != now:
            hints.append(f"pretrained.resize_patches=True or model.patch_size={size}")
    old, new = (axis_of(params, ours.image_kernel(like), 4, 2) for params in (arrays, like))
    if old and new and old != new:
        images = f"images of {counted(old, 'channel')} (now {new})"
        hints.append(f"pretrained.channels=sum, mean or tile, or {images}")
    tokens = {*ours.with_role("token", like)} ^ {*theirs.with_role("token", arrays)}
    for token in sorted(tokens):
        how, has = ("drop", "has") if token in arrays else ("add", "has no")
        other = [f" or model.{key}={old}" for key, old, _ in _different(arrays, like, kinds)[:1]]
        hints.append(f"pretrained.class_token={how}{''.join(other)} (the file {has} {token!r})")
    for name in ours.with_role("head", like):
        old, new = (axis_of(params, name, 2, 1) for params in (arrays, like))
        head = name.removesuffix("/kernel")
        if new and not any(other.startswith(f"{head}/") for other in arrays):
            hints.append(f"pretrained.reset_head=True (the file has no {head})")
        elif old and new and old != new:
            hints.append(f"pretrained.reset_head=True ({head} has {old} classes, the model {new})")
    return hints


def _different(arrays: Shapes, like: Shapes, kinds: Kinds) -> list[tuple[str, Any, Any]]:
    """Attributes that differ and can be inferred, the kind of model first."""
    before, after = model_sizes(arrays, kinds[0]), model_sizes(like, kinds[1])
    family, is_whole = MODELS[kinds[0]], not missing_sizes(before)
    conventions = (*family.head_conventions, *family.conventions)
    return [
        (key, before[key], after.get(key))
        for key in sorted(before, key=lambda key: (key != "name", key not in conventions))
        if before[key] != after.get(key)
        and (is_whole or key not in conventions)
        and (before[key] is not None or family.keys[key].default is None)
    ]


def _size_hints(arrays: Shapes, like: Shapes, kinds: Kinds) -> list[str]:
    """Hints about differences that only another model can resolve."""
    theirs, ours = map(table_of, kinds)
    hints = [f"model.{key}={old} (now {new})" for key, old, new in _different(arrays, like, kinds)]
    if theirs.with_role("pre_logits", arrays) and not ours.with_role("pre_logits", like):
        hints.append("pretrained.reset_head=True (the kept head depends on pre_logits)")
    old, new = num_tokens(arrays, kinds[0]), num_tokens(like, kinds[1])
    if old and new and old != new and not ours.with_role("positions", like):
        hints.append(f"images with {old} tokens, as in the file (now {new})")
    return hints
