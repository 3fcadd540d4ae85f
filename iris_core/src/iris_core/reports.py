"""What the kernels of a rank have reported in its status words, as errors of the host.

Kernels cannot raise: the first wait that reaches its bound, and the first kernel that finds another rank calling
differently, describe themselves in words that the host reads at a barrier and at the end (`iris_core.device_context`
has their layout).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

from iris_core import device_context
from iris_core.errors import DeviceError
from iris_core.types import DeviceType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_core.logs import RankLogger
    from iris_core.types import DeviceTarget


class Describer(Protocol):
    """Knows what the words of kernels mean to the caller; `ctx.ccl` does."""

    def describe_wait(self, address: int, sender: int) -> str:
        """Say in a sentence what is waited for at an address; nothing if it is unknown."""

    def describe_mismatch(self, words: Sequence[int]) -> str:
        """Say what another member calls differently; nothing if no kernel has found that."""


class KernelReports:
    """The status words of one rank.

    Args:
        target: the rank's device, where the words are.
        timeout_s: bound of waits in kernels, in seconds; None where they are unbounded.
    """

    def __init__(self, target: DeviceTarget, timeout_s: float | None) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self.words = torch.zeros(device_context.STATUS_WORDS, dtype=torch.int64, device=target.torch_device)
        """The words; the context tensor has their address, so they live as long as kernels run."""

    @property
    def timeout_ns(self) -> int:
        """The bound as kernels read it: in nanoseconds, 0 for none."""
        return 0 if self._timeout_s is None else max(1, int(self._timeout_s * 1e9))

    def check(self, describer: Describer, stream: Any = None) -> None:
        """Raise what kernels have reported, once.  Reads behind the work of `stream`, or of the current one.

        Raises:
            DeviceTimeoutError: a wait inside a kernel has reached its bound.
            DeviceError: a kernel has found that another rank calls differently.
        """
        error = self.error(describer, stream)
        if error is not None:
            self.words.zero_()
            raise error

    def error(self, describer: Describer, stream: Any = None) -> DeviceError | None:
        """Return what kernels have reported, as an error; None if nothing."""
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            words = self.words.tolist()
        late: DeviceError | None = None
        if self._timeout_s is not None:  # else waits are unbounded, and none can have given up
            late = device_context.status_error(words, describer.describe_wait)
        if different := describer.describe_mismatch(words):
            error = DeviceError(different)
            error.__cause__ = late  # who calls differently may come late, too
            return error
        return late

    def error_so_far(self, describer: Describer, log: RankLogger) -> DeviceError | None:
        """The same without waiting for the device: what runs there may never end, and the device may have failed."""
        target = self._target
        try:
            busy = target.type is not DeviceType.CPU and not torch.cuda.current_stream(target.index).query()
            return None if busy else self.error(describer)
        except RuntimeError as e:
            log.debug(f"nothing is known of what kernels have reported: {e}")
            return None
