"""Errors of shared memory and asynchronous operations on the CPU.

A GPU would give wrong results or hang, often intermittently; here the first such access is an error.
"""

from iris_core.errors import DeviceError


class SharedMemoryError(DeviceError):
    """Shared memory or an asynchronous operation is used in a way that has no defined result on a GPU."""


class RaceError(SharedMemoryError):
    """Two accesses to the same memory are not ordered: a wait, an arrival or a fence is missing between them."""


class UninitializedMemoryError(SharedMemoryError):
    """Shared memory is read that nothing has been written to."""


class MBarrierError(SharedMemoryError):
    """An mbarrier is used against its rules: not initialised, too many arrivals, wrong number of bytes."""
