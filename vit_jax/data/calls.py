"""Calls written as text: `decode|resize(224, method='area')`, `glyphs(size=12)`."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from vit_jax.errors import UserError, nearest


def evaluate_calls(
    key: str, text: str, table: Mapping[str, Callable[..., Any]]
) -> list[tuple[str, Any]]:
    """Calls what the terms of `a|b(1, c=2)` name in `table`; gives (name, result) for each.

    Raises:
      UserError: a syntax error, an unknown name, or an unknown, missing, ill-typed or impossible
        argument; it names `key` and what is known.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error) or "too long"
        raise UserError(f"{key} {text!r}: {reason}; write it like 'a|b(224)|c(d=1)'.") from None
    terms = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        terms.append(node.right)
        node = node.left
    return [_evaluate(f"{key} {text!r}", each, table) for each in [node, *reversed(terms)]]


def _evaluate(
    where: str, node: ast.expr, table: Mapping[str, Callable[..., Any]]
) -> tuple[str, Any]:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    text = ast.unparse(node)
    if not isinstance(call.func, ast.Name):
        raise UserError(f"{where}: {text!r} is not a name, with or without (arguments).")
    name = call.func.id
    if name not in table:
        known = ", ".join(table)
        raise UserError(f"{where}: unknown op {name!r}.{nearest(name, table)} Known: {known}.")
    try:
        args = [ast.literal_eval(value) for value in call.args]
        kwargs = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise UserError(f"{where}: {text!r}: arguments must be literals.") from None
    parameters = inspect.signature(table[name]).parameters.values()
    try:
        return name, table[name](**_bind(table[name], args, kwargs))
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        shown = ", ".join(str(each.replace(annotation=each.empty)) for each in parameters)
        raise UserError(f"{where}: {text}: {error} (arguments: {name}({shown})).") from None


def _bind(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, converted to the annotated types; TypeError with a reason."""
    signature = inspect.signature(function)
    for name in kwargs:
        if name not in signature.parameters:
            raise TypeError(f"unknown argument {name!r}.{nearest(name, signature.parameters)}")
    bound = signature.bind(*args, **kwargs)
    hints = typing.get_type_hints(function)
    return {name: _cast(name, value, hints[name]) for name, value in bound.arguments.items()}


def _cast(name: str, value: Any, hint: Any) -> Any:
    """`value` as an instance of `hint`; lists count as tuples and ints as floats."""
    members = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        for member in members:
            try:
                return _cast(name, value, member)
            except TypeError:
                continue
    elif typing.get_origin(hint) is Literal:
        if value in members:
            return value
        raise TypeError(f"{name}={value!r} must be one of {', '.join(map(str, members))}")
    elif typing.get_origin(hint) is tuple:
        if isinstance(value, list | tuple) and len(value) == len(members):
            return tuple(_cast(name, v, member) for v, member in zip(value, members, strict=True))
    elif hint is float and type(value) is int:
        return float(value)
    elif type(value) is hint:  # exactly: True is no number
        return value
    raise TypeError(f"{name}={value!r} is not {getattr(hint, '__name__', hint)}")
