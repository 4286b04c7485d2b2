"""The pickles inside PyTorch files, interpreted as data: nothing is imported and nothing called.

`pickle.Unpickler` with a restricted `find_class` would still build what a hostile file asks for:
memo tables of any size, tuples nested so deep that hashing them overflows the stack. The subset
that state dicts need is small, so it has an interpreter of its own, with limits.
"""

from __future__ import annotations

import io
import pickletools
import warnings
from collections.abc import Callable
from typing import Any

from vit_jax.errors import UserError
from vit_jax.pretrained.files.array_file import ByteFile, shorten
from vit_jax.pretrained.files.torch_symbols import (
    CALLS,
    INERT,
    KNOWN,
    MAX_ARGUMENTS,
    STORAGES,
    Inert,
    Storage,
    Symbol,
    Tensor,
    check_key,
)

# A state dict takes some 100 bytes and 30 opcodes per array, with optimizer state three times.
MAX_PICKLE_BYTES = 16 << 20
_MAX_OPCODES = 300_000
_NO_CODE = "code in pickles is never run"


def read_pickle(file: ByteFile, stream: io.BytesIO) -> tuple[Any, dict[str, Storage]]:
    """What the pickle at the position of `stream` describes; the position moves behind it.

    Returns:
      The object, of dicts, lists, tuples, texts, numbers, Tensor, Storage, Symbol and Inert; and
      all storages that occur in the pickle, by key.

    Raises:
      UserError: damaged, larger than a state dict ever is, or naming any global that it does not
        need. Nothing of it is run in any case.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in damaged texts
            machine = _Interpreter(file)
            return machine.run(stream), machine.storages
    except UserError:
        raise
    except Exception as error:  # an opcode on a value that it is not made for
        raise file.error(f"its pickle is damaged ({shorten(str(error))})") from error


class _Interpreter:
    """The pickle machine: a stack, a stack of stacks for marks, and a memo."""

    def __init__(self, file: ByteFile) -> None:
        self._file = file
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def run(self, stream: io.BytesIO) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if count >= _MAX_OPCODES:
                raise self._file.error(f"its pickle has more than {_MAX_OPCODES} opcodes")
            if opcode.name == "STOP":
                break
            if opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _LITERALS:
                self._stack.append(argument)
            elif (operation := _OPERATIONS.get(opcode.name)) is not None:
                operation(self, argument)
            else:
                raise self._file.error(
                    f"its pickle uses {opcode.name}, which no state dict needs; {_NO_CODE}"
                )
        return self._stack.pop()

    def _symbol(self, name: str) -> Symbol:
        if name not in KNOWN:
            raise self._file.error(
                f"its pickle names the global {shorten(name)}, and {_NO_CODE}; a file with a "
                "state dict of tensors is read, e.g. torch.save(model.state_dict(), PATH)"
            )
        return Symbol(name)

    def instance(self, argument: str) -> None:
        self._symbol(argument.replace(" ", ".", 1))
        raise ValueError("INST")

    def from_file(self, argument: str) -> None:
        self._stack.append(self._symbol(argument.replace(" ", ".", 1)))

    def from_stack(self, _: None) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a global without a name")
        self._stack.append(self._symbol(f"{module}.{name}"))

    def call(self, _: None) -> None:
        arguments, symbol = self._stack.pop(), self._stack.pop()
        if not isinstance(symbol, Symbol) or not isinstance(arguments, tuple):
            raise ValueError("a call of something else than a global")
        if len(arguments) > MAX_ARGUMENTS:
            raise ValueError(f"{len(arguments)} arguments")
        if symbol.name in CALLS:
            self._stack.append(CALLS[symbol.name](*arguments))
        elif symbol.name in INERT:
            self._stack.append(Inert())
        else:
            raise ValueError(f"a call of {symbol.name}")

    def build(self, _: None) -> None:
        """State goes nowhere: dicts carry PyTorch's version numbers there, the rest is inert."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict | Inert | Tensor):
            raise ValueError("state for a plain value")

    def storage(self, _: None) -> None:
        value = self._stack.pop()
        if not isinstance(value, tuple) or len(value) > MAX_ARGUMENTS:
            raise ValueError("a persistent object that is no storage")
        kind, symbol, key, _location, count, *view = value
        if kind != "storage" or symbol.name not in STORAGES or any(view):
            raise ValueError("a persistent object that is no storage")
        if not isinstance(key, str) or type(count) is not int or count < 0:
            raise ValueError("a storage without a name or a size")
        storage = Storage(key, STORAGES[symbol.name], count)
        if self.storages.setdefault(key, storage) != storage:
            raise ValueError("a storage with two types or sizes")
        self._stack.append(storage)

    def mark(self, _: None) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def since_mark(self) -> list[Any]:
        values, self._stack = self._stack, self._marked.pop()
        return values

    def drop_mark(self, _: None) -> None:
        self.since_mark()

    def pop(self, _: None) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.since_mark()

    def remember(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def recall(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def new(self, value: Any) -> None:
        self._stack.append(value)

    def tuple_of(self, count: int) -> None:
        values = [self._stack.pop() for _ in range(count)]
        self._stack.append(tuple(reversed(values)))

    def extend(self, values: list[Any]) -> None:
        if isinstance(self._stack[-1], list):
            self._stack[-1].extend(values)
        elif not isinstance(self._stack[-1], Inert):
            raise ValueError("items for a plain value")

    def set_items(self, values: list[Any]) -> None:
        keys = values[::2]
        if isinstance(self._stack[-1], dict):
            items = zip(keys, values[1::2], strict=True)
            self._stack[-1].update((check_key(key), value) for key, value in items)
        elif not isinstance(self._stack[-1], Inert):
            raise ValueError("items for a plain value")

    def set_item(self, _: None) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.set_items([key, value])


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_OPERATIONS: dict[str, Callable[[_Interpreter, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "GLOBAL": _Interpreter.from_file,
    "STACK_GLOBAL": _Interpreter.from_stack,
    "INST": _Interpreter.instance,
    "REDUCE": _Interpreter.call,
    "NEWOBJ": _Interpreter.call,
    "BUILD": _Interpreter.build,
    "BINPERSID": _Interpreter.storage,
    "MARK": _Interpreter.mark,
    "POP": _Interpreter.pop,
    "POP_MARK": _Interpreter.drop_mark,
    "DUP": lambda machine, _: machine.new(machine._stack[-1]),
    "MEMOIZE": _Interpreter.remember,
    "PUT": _Interpreter.remember,
    "BINPUT": _Interpreter.remember,
    "LONG_BINPUT": _Interpreter.remember,
    "GET": _Interpreter.recall,
    "BINGET": _Interpreter.recall,
    "LONG_BINGET": _Interpreter.recall,
    "EMPTY_LIST": lambda machine, _: machine.new([]),
    "EMPTY_DICT": lambda machine, _: machine.new({}),
    "EMPTY_SET": lambda machine, _: machine.new(Inert()),
    "LIST": lambda machine, _: machine.new(machine.since_mark()),
    "TUPLE": lambda machine, _: machine.new(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.extend([machine._stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "ADDITEMS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEM": _Interpreter.set_item,
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
}
