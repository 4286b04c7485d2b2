"""Numbers, names, keys and addresses in messages."""

import difflib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

_WITH_QUERY = re.compile(r"""(https?://[^\s?#'"]+)\?([^\s#'"]*)""")
# Keys of Amazon's, Google's and Azure's signed addresses.
_SIGNATURE = re.compile(
    r"(?i)x-(amz|goog)-.*|signature|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid"
    r"|token|sig|s[etprv]|spr|sks?|skoid|sktid|skt|ske|skv"
)
_SCRIPT = re.compile(r"(?<![\w./])(?:python )?scripts/(\w+)\.py")
called_vit = False  # whether `vit` has started this process, see `cli.main`
# Characters that change or reset the text direction.
_BIDI_CONTROLS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def list_names(names: Iterable[str], shown: int = 4) -> str:
    """The first few names and the number of the rest."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def counted(count: int, noun: str) -> str:
    """`1 image`, `12,000 images`, `2 classes`."""
    plural = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{plural}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` for the closest known name, or an empty string."""
    lowered = {candidate.lower(): candidate for candidate in known}
    begun = sorted((known for known in lowered if known.startswith(name.lower())), key=len)
    matches = (name and begun) or difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f" Did you mean {lowered[matches[0]]!r}?" if matches else ""


# What our keys are called elsewhere.
NAMES_ELSEWHERE = {
    "schedule.learning_rate": "lr base_lr peak_lr",
    "schedule.warmup_steps": "warmup warmup_epochs",
    "optimizer.name": "opt optim",
    "optimizer.weight_decay": "wd decay",
    "optimizer.clip_norm": "clip_grad grad_clip max_grad_norm clip",
    "duration.epochs": "num_epochs max_epochs train_epochs",
    "duration.steps": "max_steps total_steps num_steps train_steps",
    "dataset.name": "data data_path dataset_name",
    "dataset.batch_size": "bs batch train_batch_size",
    "a number in dataset.preprocess and dataset.eval_preprocess, as official_train(384)": (
        "image_size img_size resolution input_size size"
    ),
    "loader.num_workers": "workers dataloader_num_workers",
    "train_step.polyak_decay": "ema ema_decay model_ema polyak",
    "train_step.accumulation_steps": "gradient_accumulation_steps accum accum_steps accum_freq",
    "model.stochastic_depth_rate": "drop_path drop_path_rate",
    "model.dropout_rate": "dropout drop drop_rate",
    "model.dtype": "amp precision fp16 bf16 mixed_precision",
    "model.remat": "gradient_checkpointing grad_checkpointing",
    "mix.mixup_alpha": "mixup mixup_prob",
    "mix.cutmix_alpha": "cutmix cutmix_prob",
    "objective.label_smoothing": "smoothing",
    "pretrained.source": "checkpoint_path model_or_filename init_from weights",
    "determined by the data set (or the objective), not set in the config": "num_classes",
    "the flag --workdir": "output_dir",
}


def unknown_key(unknown: str, known: Mapping[str, Any]) -> str:
    """What is said of a key that is not among the `known` ones, by dotted key."""
    section, _, leaf = unknown.rpartition(".")
    same = [key for key in known if key.rpartition(".")[0] == section]
    kind = "the config"
    if f"{section}.name" in same and section != "dataset":
        kind = f"{section}.name={known[f'{section}.name']!r}"
    elsewhere = [key for key in known if key.endswith(f".{leaf}")]
    near = nearest(unknown, elsewhere or same or known)
    ours = [key for key, names in NAMES_ELSEWHERE.items() if leaf in names.split()]
    if ours and not elsewhere:
        near = f" Here it is {ours[0]}."
    elif len(elsewhere) == 1:
        near = f" Did you mean {elsewhere[0]!r}?"
    return f"{unknown} is not a key of {kind}.{near}"


def as_called(text: str) -> str:
    """Our text with the commands as they are typed here: `vit zoo`, not `python scripts/zoo.py`."""
    return _SCRIPT.sub(r"vit \1", text) if called_vit else text


def escaped(text: str, kept: str = "") -> str:
    """Escapes what would move a terminal's cursor, forge a line or is not valid UTF-8.

    Spaces and joiners of other scripts stay, address signatures do not.
    """
    text = unsigned(text)
    if text.isprintable():
        return text

    def is_harmless(c: str) -> bool:
        is_control = unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _BIDI_CONTROLS
        return c in kept or not is_control

    return "".join(c if is_harmless(c) else c.encode("unicode_escape").decode() for c in text)


def unsigned(text: str) -> str:
    """Removes signatures from addresses: they are secret, and change every day."""

    def without_signature(match: re.Match[str]) -> str:
        options = match[2].split("&")
        options = [text for text in options if not _SIGNATURE.fullmatch(text.partition("=")[0])]
        return match[1] + ("?" + "&".join(options) if options else "")

    return _WITH_QUERY.sub(without_signature, text)
