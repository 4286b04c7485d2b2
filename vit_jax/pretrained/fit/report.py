"""What became of every array of a file of parameters, and of every parameter of the model."""

from __future__ import annotations

import dataclasses

from vit_jax.errors import list_names


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Every name of the model is in exactly one of `loaded`, `adapted` and `reset`.

    Attributes:
      loaded: names taken as they are.
      adapted: name -> how, such as "bilinear 14x14 -> 24x18".
      reset: names taken from the new model because that was asked for.
      dropped: names that were left out -> why. Those of the file, or ours where the reader had
        translated them already; a name that is reset can be here too, for the file's array.
    """

    loaded: tuple[str, ...]
    adapted: dict[str, str]
    reset: tuple[str, ...]
    dropped: dict[str, str]

    def __str__(self) -> str:
        """One line per kind; kinds without a name are left out, but for the first."""
        count = len(self.loaded)
        kinds = {
            "loaded": f"{count} array{'' if count == 1 else 's'} as they are",
            "adapted": _by_reason(self.adapted),
            "reset": list_names(self.reset),
            "dropped": _by_reason(self.dropped),
        }
        return "\n".join(f"{kind}: {text}" for kind, text in kinds.items() if text)


def _by_reason(reasons: dict[str, str]) -> str:
    """`{name: reason}` -> "a, b (reason); c (other reason)"."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{list_names(group)} ({reason})" for reason, group in names.items())
