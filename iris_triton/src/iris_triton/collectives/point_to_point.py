"""send and recv; see `iris_triton.collectives.mail`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.team import ELEMENT_TYPES
from iris_core.errors import UnsupportedError
from iris_core.types import DeviceType
from iris_triton.collectives.mail import WORDS, receive, send
from iris_triton.collectives.parts.portable import Plan, Portable
from iris_triton.collectives.parts.sizes import blocks_for, carrier_of, layout_of
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest

_GPU_PARTS = 16


class Mail(Portable):
    """send or recv through the receiver's inbox."""

    def __init__(self, op: str) -> None:
        super().__init__(op, "mailbox")
        self._kernel = {"send": send, "recv": receive}[op]

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: once over a link, and once within a device."""
        return self.model(request, meetings=1, moved=request.nbytes, copied=request.nbytes)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel; the division of an inbox is what both sides know without each other."""
        carrier = carrier_of(request.dtype)
        item = carrier.dtype.itemsize
        own = request.options["out_stride"] if self.op == "recv" else request.options["in_stride"]
        layout = layout_of(*carrier.extend(request.shape, own))
        count = math.prod(request.shape) * carrier.parts
        parts = 1 if request.target.type is DeviceType.CPU else _GPU_PARTS
        words_nbytes = team.size * parts * WORDS * 8
        apart = (team.mail.nbytes - words_nbytes) // (team.size * parts) // 32 * 32
        if apart < 2 * item:
            raise UnsupportedError(
                f"{self.op}: the heap's system area has no room for inboxes of {team.size} ranks; open the context "
                "with a larger IRIS_SYSTEM_SIZE"
            )
        blocks = blocks_for(request, team, count, item, reduces=False)
        words, boxes = team.mail.tensor[:words_nbytes].view(torch.int64), team.mail.tensor[words_nbytes:]
        arguments: dict[str, Any] = {
            "words": words,
            "boxes": boxes,
            "bases": team.bases,
            "me": team.rank,
            "peer": request.options["peer"],
            "apart": apart,
            "count": count,
            "element": ELEMENT_TYPES.index(request.dtype),
            "piece": apart // 2 // item,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "sizes": layout.sizes,
            "strides": layout.strides,
            "PARTS": parts,
            "DIMS": layout.num_dims,
            "BLOCK": blocks.block,
        }
        name = "out" if self.op == "recv" else "inp"
        grid = min(parts, request.options["config"].get("comm_sms", parts))
        return Plan(BoundKernel(self._kernel, grid, arguments, (name,), team.device, blocks.options), carrier)

    def launch(self, plan: Plan, out: torch.Tensor | None, inp: torch.Tensor | None, stream: Any = None) -> None:
        """Launch a plan on a stream."""
        tensor = inp if out is None else out
        assert tensor is not None
        if plan.carrier is not None and not plan.kernel.is_ready:
            tensor = plan.carrier.view(tensor)
        plan.kernel(stream, tensor)
