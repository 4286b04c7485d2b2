"""Two things measured in turn, so that a machine whose speed drifts drifts for both."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """Something measured beside a peer.

    Attributes:
      case: what it is.
      peer: who else.
      ours, theirs: of each turn, in `unit`.
      unit: such as `images/s`; with `s` or `Mcycles` less is better.
    """

    case: str
    peer: str
    ours: Sequence[float]
    theirs: Sequence[float]
    unit: str

    @property
    def ratios(self) -> list[float]:
        """Of each turn; above 1 where we are ahead."""
        pairs = list(zip(self.ours, self.theirs, strict=True))
        return [a / b if self.unit.endswith("/s") else b / a for a, b in pairs]

    def json(self) -> dict[str, object]:
        return {
            "case": self.case,
            "peer": self.peer,
            "ratio": round(statistics.median(self.ratios), 4),
            "ratio_of_turns": [round(min(self.ratios), 4), round(max(self.ratios), 4)],
            "ours": round(statistics.median(self.ours), 4),
            "theirs": round(statistics.median(self.theirs), 4),
            "unit": self.unit,
        }

    def text(self) -> str:
        row = self.json()
        low, high = min(self.ratios), max(self.ratios)
        spread = f" ({low:.2f} to {high:.2f} in {len(self.ratios)} turns)" if high > low else ""
        return (
            f"{self.case}: {row['ours']:.4g} {self.unit}, {self.peer} {row['theirs']:.4g}: "
            f"ratio {row['ratio']:.2f}{spread}"
        )


def take_turns(
    subjects: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[str, list[Any]]:
    """What each subject returns in each round, after some that do not count."""
    found: dict[str, list[Any]] = {name: [] for name in subjects}
    for turn in range(-warm_up, rounds):
        for name, subject in subjects.items():
            value = subject()
            if turn >= 0:
                found[name].append(value)
        print(f"turn {turn + 1} of {rounds}" if turn >= 0 else "warming up", file=sys.stderr)
    return found
