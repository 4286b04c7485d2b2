"""Numbers, names and addresses in messages."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

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

    is_secret = _SIGNATURE.fullmatch

    def without_signature(match: re.Match[str]) -> str:
        options = [text for text in match[2].split("&") if not is_secret(text.partition("=")[0])]
        return match[1] + ("?" + "&".join(options) if options else "")

    return _WITH_QUERY.sub(without_signature, text)
