"""Kernels that describe memory to Hopper's copy unit (TMA), with scratch memory of their own."""

from __future__ import annotations

from typing import Any

import torch

from iris_gluon import _compat
from iris_triton.launcher import BoundKernel


class WithScratch(BoundKernel):
    """A bound kernel whose launches all get the same scratch memory, for which Triton asks at every launch.

    So nothing is allocated, and graphs may keep the address: launches of a team follow each other.
    """

    _scratch: torch.Tensor | None = None

    def __call__(self, stream: Any, *tensors: torch.Tensor) -> None:
        """Launch; see `BoundKernel`."""
        with _compat.scratch_from(self._allocate):
            super().__call__(stream, *tensors)

    def _allocate(self, nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < nbytes:
            # torch aligns to 512 bytes; descriptions need 128
            self._scratch = torch.empty(nbytes, dtype=torch.int8, device=f"cuda:{self._index}")
        return self._scratch
