"""`vit COMMAND ...`: scripts/COMMAND.py, also where the package alone is installed.

vit train --config=pretrain:B/16,imagenet2012 --workdir=runs/b16
vit predict runs/photos new.jpg
"""

import ast
import runpy
import sys

from vit_jax import ROOT, wording


def main() -> None:
    """Runs the script that the first argument names with the others; without one lists all."""
    scripts = {path.stem: path for path in sorted((ROOT / "scripts").glob("*.py"))}
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in scripts:
        wording.called_vit = True
        sys.argv = [str(scripts[command]), *sys.argv[2:]]
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif command in ("-h", "--help"):
        print("vit COMMAND ...; `vit COMMAND --help` says more.\n")
        for name, path in scripts.items():
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            print(f"  {name:20} {doc.splitlines()[0]}")
    else:
        near = wording.nearest(command, scripts)
        sys.exit(f"error: there is no command {command!r}.{near} See vit --help.")
