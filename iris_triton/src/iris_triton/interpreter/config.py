"""Settings of the CPU executor, one set per process."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from iris_core.errors import SettingsError

Hints = Literal["warn", "raise"]


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """How kernels run on the CPU."""

    #: refuse accesses outside live blocks and tensor arguments.  Without it a stray pointer ends the process with a
    #: segmentation fault.
    bounds_check: bool = True
    #: seconds that all programs of a launch may wait for memory that does not change, before DeadlockError
    timeout_s: float = 60.0
    #: how tl.assume, tl.multiple_of, tl.max_contiguous and `hint` that are not true are reported: "warn", once for each
    #: line of a kernel, or "raise" an AssertionError
    hints: Hints = "warn"


_current = CpuConfig()


def configuration() -> CpuConfig:
    """Return the settings that the next launch uses."""
    return _current


def configure(
    *, bounds_check: bool | None = None, timeout_s: float | None = None, hints: Hints | None = None
) -> CpuConfig:
    """Change settings of `CpuConfig` for all later launches of this process; None keeps a value.

    Returns the settings now in force; raises SettingsError for a bound that is not positive and for unknown `hints`.
    """
    global _current
    if timeout_s is not None and not timeout_s > 0:
        raise SettingsError(f"timeout_s of the CPU executor must be positive, got {timeout_s}")
    if hints is not None and hints not in get_args(Hints):
        raise SettingsError(f'hints of the CPU executor must be "warn" or "raise", got {hints!r}')
    given: dict[str, Any] = {"bounds_check": bounds_check, "timeout_s": timeout_s, "hints": hints}
    _current = replace(_current, **{name: value for name, value in given.items() if value is not None})
    return _current


@contextlib.contextmanager
def configured(**changes: Any) -> Iterator[CpuConfig]:
    """Change settings within a `with` block, for tests; arguments as for `configure`."""
    before = configuration()
    try:
        yield configure(**changes)
    finally:
        configure(**asdict(before))
