"""What checkpoint.py adds to Orbax: checksums, retention by a metric, a check of the leaves."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy

from vit_jax.errors import PassingError
from vit_jax.files.manifest import write_manifest

# In the ValueErrors that TensorStore makes of what the system says.
_DISK_ERRORS = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "os_error_code")


# Replicated arrays are written by all who hold them, each its part; below this size cutting them up
# (a program to compile for each shape and device) costs more than it saves.
_MIN_PART_BYTES = 1 << 20


class ChecksummedHandler(ocp.PyTreeCheckpointHandler):
    """Writes the manifest as the last file of the item, before Orbax commits the step.

    Orbax calls `finalize` on the primary process only, after every process has written its
    shards and their index has been merged.

    Args:
      on_failure: called, from a thread of Orbax, with the error of a save that fails there. The
        other processes wait for this one then, at barriers that nothing but minutes can end.
    """

    def __init__(self, on_failure: Callable[[Exception], None] = lambda _: None) -> None:
        arrays = ocp.type_handlers.ArrayHandler(
            min_slice_bytes_for_replica_parallel=_MIN_PART_BYTES
        )
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        super().__init__(type_handler_registry=registry)
        self.metrics: dict[str, float] = {}
        self._on_failure = on_failure

    async def async_save(
        self, directory: epath.Path, *args: Any, **kwargs: Any
    ) -> list[Any] | None:
        futures = await super().async_save(directory, *args, **kwargs) or []
        reporting: list[Any] = [_Reporting(future, self._on_failure) for future in futures]
        if jax.process_index() == 0:
            reporting.append(_WatchedCommit(directory.parent, self._on_failure))
        return reporting

    def finalize(self, directory: epath.Path) -> None:
        try:
            super().finalize(directory)
            write_manifest(Path(os.fspath(directory)), {"metrics": self.metrics})
        except Exception as error:
            self._on_failure(error)
            raise


@dataclass
class _Reporting:
    """A future that reports its error before it raises it."""

    future: Any
    on_failure: Callable[[Exception], None]

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self.future.result(timeout)
        except Exception as error:
            self.on_failure(error)
            raise

    def cancel(self) -> bool | None:
        return self.future.cancel()


class _WatchedCommit:
    """Reports what fails once all files are written; as the last of a save's futures.

    Orbax's thread asks its futures, then writes metadata and renames the step. An error there it
    prints and keeps: its next thread meets it only after the other processes, which wait.

    Args:
      unfinished: folder of the step until it is renamed.
      on_failure: called with what can be said of the reason.
    """

    def __init__(self, unfinished: epath.Path, on_failure: Callable[[Exception], None]) -> None:
        self._unfinished = os.fspath(unfinished)
        self._on_failure = on_failure

    def result(self, timeout: float | None = None) -> None:
        del timeout
        committing = threading.current_thread()
        threading.Thread(target=self._watch, args=(committing,), daemon=True).start()

    def cancel(self) -> None:
        """Nothing has begun."""

    def _watch(self, committing: threading.Thread) -> None:
        committing.join()
        if os.path.isdir(self._unfinished):
            self._on_failure(_why_not_renamed(self._unfinished))


def _why_not_renamed(folder: str) -> Exception:
    """What another write to the folder meets: the error itself is Orbax's alone."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return PassingError("its files are complete, but Orbax did not rename their folder; see above")


@dataclass
class KeepBest(preservation_policy.PreservationPolicy):
    """Keeps the `number` steps with the highest score; a step without one is never best."""

    scores: dict[int, float]
    number: int

    def should_preserve(
        self,
        checkpoints: Any,
        *,
        context: preservation_policy.PreservationContext,
    ) -> list[bool]:
        scored = [info.step for info in checkpoints if info.step in self.scores]
        scored.sort(key=lambda step: (self.scores[step], step), reverse=True)
        return [info.step in scored[: self.number] for info in checkpoints]


def open_manager(
    folder: Path,
    handler: ChecksummedHandler,
    *,
    item: str,
    keep: int,
    scores: dict[int, float],
    keep_best: int,
) -> ocp.CheckpointManager:
    """Orbax's manager over an existing folder: asynchronous, keeps the latest and the best steps.

    Args:
      item: name of the folder that each step's state goes to.
      scores: by step, higher is better; looked at after each save.
    """
    policies = [preservation_policy.LatestN(keep), KeepBest(scores, keep_best)]
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(item, ocp.args.PyTreeSave, handler)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
        # Orbax's own metadata may be damaged and is not needed: ours is in the manifest.
        lightweight_initialize=True,
        async_options=ocp.options.AsyncOptions(
            # Otherwise a save that fails early leaves threads that wait minutes for its folder.
            create_directories_asynchronously=False,
            # Who hangs is for multihost/watchdog.py to say.
            timeout_secs=7 * 24 * 3600,
        ),
    )
    return ocp.CheckpointManager(folder, options=options, handler_registry=registry)


def is_disk_error(error: Exception) -> bool:
    """Whether a save failed for want of room or rights, not for a fault of the program."""
    if isinstance(error, TimeoutError):  # an OSError, but of another process that hangs
        return False
    tensorstore = isinstance(error, ValueError) and any(t in str(error) for t in _DISK_ERRORS)
    return tensorstore or isinstance(error, OSError)


def _leaves(tree: Any) -> Iterator[tuple[str, tuple[tuple[int, ...], Any]]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), (leaf.shape, leaf.dtype)


def differing_leaves(saved_tree: Any, abstract_state: Any) -> list[str]:
    """Leaves that differ in name, shape or dtype, each with both: Orbax casts without a word.

    Args:
      saved_tree: of a handler's metadata.
      abstract_state: pytree of jax.ShapeDtypeStruct.
    """
    saved, wanted = dict(_leaves(saved_tree)), dict(_leaves(abstract_state))

    def show(leaves: dict[str, Any], name: str) -> str:
        return f"{leaves[name][1]}{list(leaves[name][0])}" if name in leaves else "nothing"

    return [
        f"{name} (saved {show(saved, name)}, needed {show(wanted, name)})"
        for name in sorted(saved.keys() | wanted.keys())
        if name not in saved or name not in wanted or saved[name] != wanted[name]
    ]
