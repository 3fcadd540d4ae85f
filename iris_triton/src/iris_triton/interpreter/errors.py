"""What can go wrong in a kernel on the CPU, beyond what the kernel itself raises."""

from __future__ import annotations

from iris_core.errors import DeviceError


class OutOfBoundsError(DeviceError, IndexError):
    """A kernel touched memory outside every live block and every tensor argument; nothing was read or written.

    Attributes:
        kernel: name of the kernel.
        program: index of the program, as tl.program_id gives it.
        lane: index of the first offending element within the block that was accessed.
        access: "load", "store", "atomic_add", ...
        address: the offending address.
        nbytes: bytes of one element.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str,
        program: tuple[int, int, int],
        lane: int,
        access: str,
        address: int,
        nbytes: int,
    ) -> None:
        super().__init__(message)
        self.kernel, self.program, self.lane = kernel, program, lane
        self.access, self.address, self.nbytes = access, address, nbytes


class DeadlockError(DeviceError, TimeoutError):
    """All programs of a launch wait for memory that no rank changes, or that has not changed within the bound.

    Attributes:
        kernel: name of the kernel.
        rank: the running rank; None where there is no heap.
        program: index of the program that reports.
        address: the address it waits on (the first one, if it polls several).
        last_value: raw bits of the last value seen, as an unsigned integer.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str,
        rank: int | None,
        program: tuple[int, int, int],
        address: int,
        last_value: int,
    ) -> None:
        super().__init__(message)
        self.kernel, self.rank, self.program = kernel, rank, program
        self.address, self.last_value = address, last_value
