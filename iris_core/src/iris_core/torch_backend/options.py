"""Options of a process group of backend "iris", in the form in which this torch hands options on."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from iris_core.errors import ArgumentError
from iris_core.types import ReduceOp

IS_BACKEND = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 14)
"""Whether this torch takes a backend for each device type that is written in Python."""

_REDUCTIONS = {getattr(c10d.ReduceOp, each.name): each for each in ReduceOp}
_SUM = c10d.ReduceOp.SUM
_Base: Any = c10d.Backend.Options if IS_BACKEND else object
_known: dict[str, Options] = {}


@dataclass(frozen=True)
class Options(_Base):  # type: ignore[misc]
    """What `pg_options=` of `init_process_group` and `new_group` takes: arguments of the group's `Iris` contexts."""

    heap_size: int | str | None = None  #: as of `Iris`
    allocator: str = "auto"  #: likewise
    backend: str = "auto"  #: likewise
    #: types of the devices that Iris serves; None for "cuda" where there are GPUs, else "cpu"
    devices: tuple[str, ...] | None = None
    #: as of `Iris`, asked for when the group is made: reductions of floats and complex numbers that go to the group
    #: inside are refused then
    deterministic: bool | None = None

    _timeout = None  # which meshes read from options; that of a group is an argument of torch's

    def __post_init__(self) -> None:
        if isinstance(self.devices, str) or not {"cpu", "cuda"}.issuperset(self.devices or ()):
            raise ArgumentError(f'devices={self.devices!r} must be a tuple of "cpu" and "cuda", or None')
        if IS_BACKEND:  # a split gets a copy of torch's part alone, so the name of the backend there says the rest
            super().__init__(repr(self))
            _known[repr(self)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Options, astuple(self)


def uncopied(options: Any) -> Any:
    """Return the options of which torch has made a copy for a split; others as they are."""
    return _known.get(options.backend, options)


def reduction(opts: Any) -> tuple[ReduceOp, Any]:
    """Return the reduction that options say, and the factor that it multiplies the inputs by first."""
    said: Any = getattr(opts, "reduceOp", opts)
    if said == _SUM:  # the usual one, in a fifth of the time
        return ReduceOp.SUM, None
    found = _REDUCTIONS.get(getattr(said, "op", said))
    if found is not None:
        return found, None
    if said is None or isinstance(said, ReduceOp):
        return said or ReduceOp.SUM, None
    return ReduceOp.SUM, said.__getstate__()[1]  # PREMUL_SUM
