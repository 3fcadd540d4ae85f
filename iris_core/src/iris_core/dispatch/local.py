"""Collectives of a rank alone: every one of them is a copy, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iris_core.dispatch.requests import OPS, POINT_TO_POINT
from iris_core.types import Availability, DeviceType, PluginInfo, PluginKind

if TYPE_CHECKING:
    import torch

    from iris_core.types import CollectiveRequest

LOCAL_INFO = PluginInfo(
    name="local",
    kind=PluginKind.COLLECTIVE,
    summary="collectives of a rank alone",
    devices=frozenset(DeviceType),
)
"""What the core says about its own algorithms."""

_BYTES_PER_S, _LAUNCH_S = 1e11, 2e-6


class Local:
    """One operation of a rank alone, as torch's copy.

    Args:
        op: the operation.
    """

    name = "local"

    def __init__(self, op: str) -> None:
        self.op = op

    @property
    def info(self) -> PluginInfo:
        """The description."""
        return LOCAL_INFO

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether the rank is alone."""
        if request.group_size > 1:
            return Availability.no(f"it serves a rank alone, and the group has {request.group_size}")
        if request.options.get("config"):
            return Availability.no(f"it has no use for {', '.join(request.options['config'])} of the config")
        return Availability.yes()

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds."""
        return _LAUNCH_S + request.nbytes / _BYTES_PER_S

    def prepare(self, request: CollectiveRequest, context: Any) -> None:
        """Nothing is needed."""

    def launch(self, plan: None, out: torch.Tensor | None, inp: torch.Tensor | None, stream: Any = None) -> None:
        """Copy the input to the output, if they are not the same memory."""
        if out is None or inp is None or (out.data_ptr() == inp.data_ptr() and out.stride() == inp.stride()):
            return
        if stream is None:
            out.copy_(inp.view(out.shape))
            return
        import torch

        with torch.cuda.stream(stream):
            out.copy_(inp.view(out.shape))


def local_algorithms() -> list[Local]:
    """Return the algorithms of a rank alone."""
    return [Local(op) for op in OPS if op not in POINT_TO_POINT]
