"""The whole error hierarchy.

Every message says what failed, why, and the way out.  Errors that callers may want to handle as a standard Python error
derive from it as well: `except MemoryError` catches an exhausted heap, `except ValueError` a tensor off the heap.

    IrisError
      PluginError -> PluginNotFoundError, PluginLoadError, PluginConflictError, PluginAPIVersionError,
                     NoUsablePluginError
      SettingsError, CapabilityError, ArgumentError, UnsupportedError -> LayoutError
      DeviceError -> DriverError, PeerAccessError, DeviceTimeoutError
      HeapError   -> HeapExhaustedError, NotOnHeapError, SymmetryError, HeapClosedError
      RankMismatchError, GroupError, CollectiveTimeoutError, PeerLostError
      BenchmarkError
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from typing import Any


class IrisError(Exception):
    """Base of every error that Iris raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between processes; `args` alone lacks what some constructors require, and TimeoutError, an
        # OSError, takes them in its __init__ only.
        return copyreg.__newobj__, (type(self), *self.args), {**vars(self), "args": self.args}  # type: ignore[attr-defined]


FAILURES = (Exception, SystemExit, GeneratorExit)
"""What the code of a plugin or of a file may raise as its own failure; a KeyboardInterrupt is meant for the program."""


# -- plugins ----------------------------------------------------------------------------------------------------------
class PluginError(IrisError):
    """Base of the errors about finding, loading and choosing plugins."""


class PluginNotFoundError(PluginError, LookupError, ValueError):
    """No installed plugin has the requested name; the message lists what is installed and close matches."""

    def __init__(self, message: str, *, name: str = "", close_matches: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.close_matches = tuple(close_matches)

    def __str__(self) -> str:  # LookupError would quote the message like a key
        return str(self.args[0])


class PluginLoadError(PluginError, ImportError):
    """An installed plugin could not be imported or registered; the original error is chained."""


class PluginConflictError(PluginError):
    """Two distributions offer the same plugin name; `name@distribution` chooses one."""


class PluginAPIVersionError(PluginError):
    """A plugin was written for another major version of the plugin API; the message has both numbers."""


class NoUsablePluginError(PluginError):
    """No candidate can be used here; the message lists each one with its reason."""

    def __init__(self, message: str, *, reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})


# -- settings, capabilities -------------------------------------------------------------------------------------------
class SettingsError(IrisError, ValueError):
    """A setting has a wrong value or an unknown name; the message says where the value came from."""


class CapabilityError(IrisError):
    """The chosen allocator and backend do not fit together; the message names the missing capability."""


class UnsupportedError(IrisError, NotImplementedError):
    """The request is not supported here; the message says by which component, and what is supported."""


class LayoutError(UnsupportedError, ValueError):
    """A tensor layout other than torch.strided was asked for."""


class ArgumentError(IrisError, ValueError, RuntimeError):
    """A tensor factory got an argument that cannot be; a RuntimeError as in torch, and a ValueError."""


# -- device -----------------------------------------------------------------------------------------------------------
class DeviceError(IrisError, RuntimeError):
    """Base of the errors about devices; a requested device that is not this context's own is one too."""

    def __init__(self, *args: object, rank: int | None = None, peer: int | None = None, op: str = "") -> None:
        super().__init__(*args)
        self.rank = rank  #: the rank whose kernel has reported it; None for an error of the host
        self.peer = peer  #: the rank that it waited for, or that has called differently; None if unknown
        self.op = op  #: the operation; empty if unknown


class DriverError(DeviceError):
    """A driver call failed."""

    def __init__(self, call: str, code: int, name: str, hint: str = "") -> None:
        super().__init__(f"{call} failed with {name} ({code})" + (f": {hint}" if hint else ""))
        self.call = call  #: name of the driver function
        self.code = code  #: its numeric result
        self.name = name  #: the driver's name of that result


class PeerAccessError(DeviceError):
    """A device cannot reach a peer's memory."""


class DeviceTimeoutError(DeviceError, TimeoutError):
    """A wait inside a kernel of this rank, or of another one, reached its bound (IRIS_DEVICE_TIMEOUT).

    The message names rank, program and address, and as far as known for whom it waited, and in which operation.
    """

    # RuntimeError's, which comes first, cannot make it again from a pickle
    __new__ = TimeoutError.__new__  # type: ignore[assignment]


# -- heap -------------------------------------------------------------------------------------------------------------
class HeapError(IrisError, RuntimeError):
    """Base of the errors about the symmetric heap."""


class HeapExhaustedError(HeapError, MemoryError):
    """The symmetric heap has no free block that is large enough; its state stays usable."""

    def __init__(self, message: str, *, requested_bytes: int, free_bytes: int, largest_free_bytes: int) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes  #: size of the request after rounding
        #: sum of all free blocks, without what groups of ranks have at the heap's end
        self.free_bytes = free_bytes
        self.largest_free_bytes = largest_free_bytes  #: the largest of them


class NotOnHeapError(HeapError, ValueError):
    """A tensor or pointer does not lie wholly on the symmetric heap."""


class SymmetryError(HeapError):
    """The ranks' allocation histories differ; the message names the ranks and the first differing call."""


class HeapClosedError(HeapError):
    """The heap or its context was used after close()."""


# -- world ------------------------------------------------------------------------------------------------------------
class RankMismatchError(IrisError, RuntimeError):
    """The ranks differ in what must be alike: plugins, versions, sizes, the arguments of a call, or which call it is.

    Or they wait for each other in calls of different groups.  The message shows the table.
    """


class GroupError(IrisError, RuntimeError):
    """A rank was asked to act in a process group that it is not a member of."""


class CollectiveTimeoutError(IrisError, TimeoutError):
    """A host collective did not complete in time; the message says where the missing ranks are, as far as known."""

    def __init__(self, message: str, *, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)  #: the ranks that did not arrive, as far as known


class PeerLostError(IrisError, RuntimeError):
    """The process of a peer ended while this rank still needed it."""

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)  #: the ranks that are gone


# -- benchmarks -------------------------------------------------------------------------------------------------------
class BenchmarkError(IrisError, ValueError):
    """A benchmark is declared wrongly, or there is none of that name; a wrong result is not an error of this kind."""


def error_text(error: BaseException) -> str:
    """Return an error on one line, with its type."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - of a plugin, whose own code makes the text
        text = "(making its text raised)"
    return f"{type(error).__name__}: {' '.join(text.split())}"
