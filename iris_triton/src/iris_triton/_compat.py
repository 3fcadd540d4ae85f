"""The one place that knows which Triton versions exist and where their private interfaces lie.

Everything here is private to Triton and may move in any release; the table says for which releases it was tried.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

TESTED = ((3, 6), (3, 7), (3, 8), (3, 9))
"""(major, minor) of the Triton releases that the test suite was run with."""


def version() -> tuple[int, int]:
    """(major, minor) of the installed Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def version_problem() -> str:
    """What is wrong with the installed Triton's version; empty if it is in the table."""
    if version() in TESTED:
        return ""
    known = ", ".join(f"{a}.{b}" for a, b in TESTED)
    return f"Triton {triton.__version__} is not one of the versions that Iris was tested with ({known})"


# `triton.aggregate` is public from 3.8 on; before, only the language's core has it.
if hasattr(triton, "aggregate"):
    aggregate = triton.aggregate
else:
    from triton.language.core import _aggregate as aggregate  # noqa: F401


# -- for compile_only -------------------------------------------------------------------------------------------------
class TargetDriver(DriverBase):  # type: ignore[misc]  # Triton is untyped here
    """Stands in for a GPU's driver while compiling without one; cannot launch."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__()
        self._target = target

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_device(self) -> str:
        """A name instead of a number: kernels are cached by device, and each target needs a cache of its own."""
        return f"{self._target.backend}:{self._target.arch}"

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> Any:
        raise RuntimeError(f"there is no device: compiling for {self.get_current_device()} only")

    def get_benchmarker(self) -> Any:
        raise RuntimeError(f"there is no device: compiling for {self.get_current_device()} only")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


@contextlib.contextmanager
def active_target(target: GPUTarget) -> Iterator[None]:
    """Let Triton believe that `target` is the current device."""
    # reset_active() would probe for a real GPU and raise where there is none.
    previous = driver._active
    driver.set_active(TargetDriver(target))
    try:
        yield
    finally:
        driver._active = previous
