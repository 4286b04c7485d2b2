"""The results as the tables of docs/performance.md.

python benchmarks/table.py benchmarks/results/*.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def markdown(path: Path) -> str:
    """A file of results as a line that says how it was made, and a table."""
    found = json.loads(path.read_text())
    # The older files have the command of before: `benchmark.py step --variant=S/16`.
    command = re.sub(r"^benchmark.py (\w+)", r"python benchmarks/\1.py", found["command"])
    versions = ", ".join(f"{name} {each}" for name, each in found["versions"].items())
    lines = [f"`{command}` on {found['machine']} ({versions}):", ""]
    if "fit" in found["cases"][0]:
        lines.append("| model | pixels | images a device that fit | images/s a device |")
        lines.append("|---|---|---|---|")
        for row in found["cases"]:
            speed = f"{row['images_per_second']:.4g}"
            lines.append(f"| {row['model']} | {row['pixels']} | {row['fit']} | {speed} |")
        return "\n".join(lines)
    lines.append("| model | case | unit | ours | peer | theirs | ratio | of turns |")
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in found["cases"]:
        low, high = row["ratio_of_turns"]
        spread = f"{low:.2f} to {high:.2f}" if high > low else ""
        cells = [row["model"], row["case"], row["unit"], f"{row['ours']:.4g}", row["peer"]]
        cells += [f"{row['theirs']:.4g}", f"**{row['ratio']:.2f}**", spread]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n\n".join(markdown(Path(path)) for path in sys.argv[1:]))
