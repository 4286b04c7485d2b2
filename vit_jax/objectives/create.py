"""Objective names to objects."""

from __future__ import annotations

from typing import Any

from vit_jax.errors import check_known
from vit_jax.objectives.classification import Classification

OBJECTIVES = {"classification": Classification}


def create_objective(name: str, *, model: Any, **kwargs: Any) -> Any:
    """Builds the objective called `name`: what is minimised, and what is measured per example.

    Raises:
      UserError: unknown name; unknown keyword arguments are a TypeError.
    """
    check_known("objective.name", name, OBJECTIVES)
    return OBJECTIVES[name](model=model, **kwargs)
