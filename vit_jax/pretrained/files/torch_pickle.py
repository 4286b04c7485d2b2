"""The pickles inside PyTorch files, read without PyTorch and without running any code in them."""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from vit_jax.pretrained.files.array_file import BadFile, shorten

# A state dict takes some 200 bytes per array, with an optimizer's state three times that.
MAX_PICKLE_BYTES = 4 << 20


class Storage(NamedTuple):
    """A run of numbers in the file."""

    key: str
    dtype: np.dtype
    num_elements: int


class Tensor(NamedTuple):
    """A view of a storage; `offset` and `strides` count elements. Unchecked: a file may lie."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Inert:
    """Stands for an object that is of no interest, whatever is put into it."""

    def __init__(self, *arguments: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


class _Dict(dict[Any, Any]):
    """Takes only keys that are quick to hash: nested tuples take for ever, or all of the stack."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | bytes | int | None):
            raise BadFile(f"its pickle has {shorten(key)} as a key")
        super().__setitem__(key, value)


_DTYPES = {
    "torch.FloatStorage": np.float32,
    "torch.HalfStorage": np.float16,
    "torch.BFloat16Storage": ml_dtypes.bfloat16,
    "torch.DoubleStorage": np.float64,
    "torch.LongStorage": np.int64,
    "torch.IntStorage": np.int32,
    "torch.ShortStorage": np.int16,
    "torch.CharStorage": np.int8,
    "torch.ByteStorage": np.uint8,
    "torch.BoolStorage": np.bool_,
}
# Only functions without effects and `Inert` are here to be called.
_GLOBALS: dict[str, Any] = {name: np.dtype(dtype) for name, dtype in _DTYPES.items()} | {
    "collections.OrderedDict": lambda: _Dict(),
    "torch.Size": lambda sizes: sizes,
    "torch._utils._rebuild_tensor": Tensor,
    "torch._utils._rebuild_tensor_v2": lambda *arguments: Tensor(*arguments[:4]),
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
    # What training scripts leave in a checkpoint beside the parameters.
    "_codecs.encode": Inert,
    "argparse.Namespace": Inert,
    "collections.Counter": Inert,
    "collections.defaultdict": Inert,
    "numpy.core.multiarray._reconstruct": Inert,
    "numpy._core.multiarray._reconstruct": Inert,
    "numpy.core.multiarray.scalar": Inert,
    "numpy._core.multiarray.scalar": Inert,
    "numpy.dtype": Inert,
    "numpy.ndarray": Inert,
    "pathlib.PosixPath": Inert,
    "pathlib.WindowsPath": Inert,
    "pathlib._local.PosixPath": Inert,  # of Python 3.13
    "pathlib._local.WindowsPath": Inert,
    "torch.device": Inert,
    "torch.bfloat16": Inert,
    "torch.float16": Inert,
    "torch.float32": Inert,
}


class StateDictUnpickler(pickle._Unpickler):
    """Builds what a state dict needs: dicts, lists, tuples, texts, numbers and `Tensor`.

    Python's form of the unpickler, because its opcodes can be replaced. The one in C allocates
    gigabytes for a memo index that five bytes ask for, and puts any key into a dict.

    Attributes:
      storages: those that the pickle mentions, by key.
    """

    stack: list[Any]

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Imports nothing.

        Raises:
          BadFile: a global that state dicts do not need.
        """
        symbol = f"{module}.{name}"
        if symbol not in _GLOBALS:
            raise BadFile(
                f"its pickle names the global {shorten(symbol)}, and code in pickles is never run; "
                "a file with a state dict is read, e.g. torch.save(model.state_dict(), PATH)"
            )
        return _GLOBALS[symbol]

    def persistent_load(self, pid: Any) -> Storage:
        """A tensor's data, which PyTorch keeps outside of the pickle."""
        kind, dtype, key, _location, count, *view = pid
        if not isinstance(key, str) or not isinstance(dtype, np.dtype) or type(count) is not int:
            raise BadFile("its pickle has a storage without a name, type or size")
        storage = Storage(key, dtype, count)
        if (
            kind != "storage"
            or count < 0
            or any(view)
            or self.storages.setdefault(key, storage) != storage
        ):
            raise BadFile(f"its pickle has an impossible storage {shorten(key)}")
        return storage

    def _load_dict(self) -> None:
        self.stack.append(_Dict())

    def _load_build(self) -> None:
        """Drops the state: in dicts PyTorch's version numbers, and the rest is inert."""
        self.stack.pop()

    dispatch = {
        opcode: load
        for opcode, load in pickle._Unpickler.dispatch.items()
        # These build dicts and sets of any keys, and buffers of any size.
        if opcode not in pickle.DICT + pickle.EMPTY_SET + pickle.FROZENSET + pickle.BYTEARRAY8
    } | {  # type: ignore[assignment, operator]
        pickle.EMPTY_DICT[0]: _load_dict,
        pickle.BUILD[0]: _load_build,
    }
