"""Lifetime of a heap's addresses and mappings: until the allocator is closed and the last tensor is freed."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from iris_core.errors import DriverError
from iris_core.logs import logger

if TYPE_CHECKING:
    from iris_allocators.driver import VmmDriver
    from iris_allocators.vmem.pieces import AddressSpace

IDLE_TIMEOUT_S = 5.0
"""How long closing waits for the device; the time after which a kernel is taken for one that never ends."""


class Lease:
    """Held by the allocator and by every storage on the heap; when it is gone, everything is unmapped."""

    def __init__(self, driver: VmmDriver, space: AddressSpace, device: str) -> None:
        self._pid = os.getpid()
        weakref.finalize(self, _release, driver, space, device, self._pid).atexit = False

    @property
    def is_ours(self) -> bool:
        """Whether this process created the heap; a forked one has its objects, but not the device."""
        return os.getpid() == self._pid


def idle(driver: VmmDriver, device: str) -> bool:
    """Wait until the device is idle; return False after IDLE_TIMEOUT_S: then no memory may be unmapped."""
    done = threading.Event()

    def wait() -> None:
        try:
            driver.synchronize()
        except DriverError as e:  # the device has failed: nothing runs there any more
            logger.warning("%s: %s", device, e)
        done.set()

    try:  # in another thread: the driver's own wait is unbounded, and cannot be interrupted
        threading.Thread(target=wait, name="iris-vmem-idle", daemon=True).start()
    except RuntimeError as e:  # the process ends, where Python 3.12 starts no thread
        logger.debug("%s: memory of a heap that was not closed stays: %s", device, e)
        return False
    if done.wait(IDLE_TIMEOUT_S):
        return True
    logger.warning(
        "%s is still busy after %g s: memory of a closed heap stays until the process ends", device, IDLE_TIMEOUT_S
    )
    return False


def _release(driver: VmmDriver, space: AddressSpace, device: str, pid: int) -> None:
    """Release the address space after the last lease.  Called by a finalizer, whose errors no caller could catch."""
    if os.getpid() != pid or not idle(driver, device):
        return
    try:
        space.release()
    except DriverError as e:
        logger.warning("%s: memory of a closed heap stays until the process ends: %s", device, e)
