"""Reads `op|op(argument, name=argument)|...` against a table of ops; the grammar is Python's."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vit_jax.errors import UserError, nearest


def build(
    spec: str, ops: Mapping[str, Callable[..., Any]], pipelines: Mapping[str, Callable[..., str]]
) -> list[Any]:
    """Calls the constructors in `ops` that `spec` names, with its literal arguments.

    A name in `pipelines` is called likewise and must return a spec, which is expanded in place.

    Raises:
      UserError: see `preprocess.parse`.
    """
    built: list[Any] = []
    for node in _terms(spec):
        name, args, kwargs = _call(spec, node)
        known = {**ops, **pipelines}
        if name not in known:
            raise UserError(
                f"preprocess {spec!r}: unknown op {name!r}.{nearest(name, known)} "
                f"Known ops: {', '.join(ops)}; pipelines: {', '.join(pipelines)}."
            )
        signature = f"{name}{_show(known[name])}"
        try:
            values = _bind(known[name], args, kwargs)
            made = known[name](**values)
        except (TypeError, ValueError) as error:
            end = "" if str(error).endswith("?") else "."
            raise UserError(
                f"preprocess {spec!r}: {ast.unparse(node)}: {error}{end} Arguments: {signature}."
            ) from None
        if name in pipelines:
            try:
                built += build(made, ops, pipelines)
            except UserError as error:
                raise UserError(f"preprocess {spec!r}: {name} stands for {error}") from None
        else:
            built.append(made)
    return built


def _terms(spec: str) -> Iterator[ast.expr]:
    """The operands of `|`, from left to right."""
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(
            f"preprocess {spec!r}: {reason}. Write ops with literal arguments, separated by '|', "
            "such as 'decode|resize(224)|flip_lr'."
        ) from None
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            stack += [node.right, node.left]
        else:
            yield node


def _call(spec: str, node: ast.expr) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, positional and keyword arguments of `op` or `op(...)`."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    text = ast.unparse(node)
    if not isinstance(call.func, ast.Name):
        raise UserError(
            f"preprocess {spec!r}: {text!r} is not an op; write a name, with or without arguments "
            "in parentheses."
        )
    kwargs = {}
    try:
        args = [ast.literal_eval(value) for value in call.args]
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError
            kwargs[keyword.arg] = ast.literal_eval(keyword.value)
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise UserError(
            f"preprocess {spec!r}: arguments must be literals (numbers, strings in quotes, tuples, "
            f"True, False, None), not as in {text!r}."
        ) from None
    return call.func.id, args, kwargs


def _bind(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, converted to the annotated types; TypeError with a reason."""
    signature = inspect.signature(function)
    for name in kwargs:
        if name not in signature.parameters:
            hint = nearest(name, signature.parameters)
            raise TypeError(f"unknown argument {name!r}" + (f".{hint}" if hint else ""))
    bound = signature.bind(*args, **kwargs)
    hints = typing.get_type_hints(
        function.__init__ if inspect.isclass(function) else function  # type: ignore[misc]
    )
    return {name: _cast(name, value, hints[name]) for name, value in bound.arguments.items()}


def _cast(name: str, value: Any, hint: Any) -> Any:
    """`value` as an instance of `hint`; lists count as tuples and ints as floats."""
    if isinstance(hint, types.UnionType):
        for member in typing.get_args(hint):
            try:
                return _cast(name, value, member)
            except TypeError:
                continue
    elif typing.get_origin(hint) is tuple:
        members = typing.get_args(hint)
        if isinstance(value, list | tuple) and len(value) == len(members):
            return tuple(_cast(name, v, member) for v, member in zip(value, members, strict=True))
    elif hint is float and type(value) is int:
        return float(value)
    elif type(value) is hint:  # exactly: True is no number
        return value
    raise TypeError(f"{name}={value!r} is not {_name(hint)}")


def _name(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(map(_name, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"({', '.join(map(_name, typing.get_args(hint)))})"
    names = {int: "int", float: "float", str: "str", bool: "True or False", type(None): "None"}
    return names[hint]


def _show(function: Callable[..., Any]) -> str:
    """A signature without types: `(size, area=(0.05, 1.0))`."""
    parameters = inspect.signature(function).parameters.values()
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in parameters)})"
