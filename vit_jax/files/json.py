"""JSON files that are whole whenever they are there, and errors that name the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError, explained
from vit_jax.files.manifest import write_atomically


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a JSON file that is either the old one or the new one, whenever the power goes."""
    write_atomically(Path(path), json.dumps(value, indent=2) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file.

    Raises:
      UserError: the file is missing, unreadable or not JSON; names the file.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise explained(f"{path} cannot be read: {error.strerror}.", error) from error
    except ValueError as error:  # JSON and UTF-8 errors both
        raise UserError(f"{path} is damaged, not a JSON file: {error}.") from error
