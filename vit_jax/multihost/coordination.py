"""JAX's coordination service: who takes part in a run, and the values its processes share.

JAX's own names for these would start its devices, which is too early for some; and it has none for
the service's client, which Orbax takes from the same place.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src import distributed


def coordination_client() -> Any:
    """The client of the key-value store; None in a process alone."""
    return distributed.global_state.client


def num_processes() -> int:
    """Processes of this run, known as soon as they have found each other."""
    return distributed.global_state.num_processes or 1 if coordination_client() else 1


def process_id() -> int:
    """The number of this process among them; 0 is where the coordination service runs."""
    return distributed.global_state.process_id if coordination_client() else 0


def try_get(client: Any, key: str) -> str | None:
    """The value of a key, or None where it has none."""
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise
