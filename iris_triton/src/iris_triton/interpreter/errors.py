"""Errors of kernels on the CPU, beyond those that the kernel itself raises."""

from typing import Any

from iris_core.errors import DeviceError


class _KernelError(DeviceError):
    kernel: str
    program: tuple[int, int, int]
    address: int

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message)
        vars(self).update(attributes)


class OutOfBoundsError(_KernelError, IndexError):
    """A kernel touched memory outside every live block and every tensor argument; nothing was read or written.

    Attributes:
        kernel: name of the kernel.
        program: index of the program, as tl.program_id gives it.
        lane: index of the first offending element within the block that was accessed.
        access: "load", "store", "atomic_add", ...
        address: the offending address.
        nbytes: bytes of one element.
    """

    lane: int
    access: str
    nbytes: int


class DeadlockError(_KernelError, TimeoutError):
    """All programs of a launch wait for memory that no rank changes, or that has not changed within the bound.

    Attributes:
        kernel: name of the kernel.
        rank: the running rank; None where there is no heap.
        program: index of the program that reports.
        address: the address it waits on (the first one, if it polls several).
        last_value: raw bits of the last value seen, as an unsigned integer.
        elsewhere: ranks on which no kernel has waited meanwhile; one of them may be what this one waits for.
    """

    rank: int | None
    last_value: int
    elsewhere: tuple[int, ...]
