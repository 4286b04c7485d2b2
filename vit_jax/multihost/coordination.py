"""JAX's coordination service: which processes take part in a run, and the values they share.

jax.process_count() and the like would start the devices, which is too early for some callers; and
JAX has no public name for the service's client.
"""

from __future__ import annotations

from typing import Any

from jax._src import distributed


def coordination_client() -> Any:
    """The client of the key-value store; None in a process alone."""
    return distributed.global_state.client


def coordinator_address() -> str:
    """host:port of the service."""
    return distributed.global_state.coordinator_address or ""


def num_processes() -> int:
    """Processes of this run, known as soon as they have found each other."""
    return distributed.global_state.num_processes or 1 if coordination_client() else 1


def process_id() -> int:
    """The number of this process; 0 is where the coordination service runs."""
    return distributed.global_state.process_id if coordination_client() else 0
