"""`all_reduce_rms_norm` on every device: a collective of `ctx.ccl`, and torch's operations after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from iris_core.dispatch.products import NORM
from iris_core.dispatch.team import Host
from iris_core.providers.model import everywhere
from iris_core.providers.parts import dense, part_of, scratch_of
from iris_core.types import Availability, DeviceType, NormRequest

LAUNCHES = 4
"""Kernels that a norm takes behind the collective, at least."""

_GPU = 3e-6, 3e11, 1e12
_CPU = 1e-3, 2e9, 2e9


def norm_s(request: NormRequest, *, launches: int, barriers: int, moved: float, passes: int) -> float:
    """Return rough seconds: launches and barriers, bytes over the links, and passes over x in a device's memory."""
    fixed, link, memory = _CPU if request.target.type is DeviceType.CPU else _GPU
    return (launches + barriers) * fixed + moved / link + passes * request.nbytes / memory


@dataclass(slots=True)
class _Plan:
    collective: Any
    total: torch.Tensor
    eps: float


class UnfusedNorm:
    """The collective, then the norm."""

    op, name = NORM, "unfused"
    info = everywhere("unfused", "all_reduce and torch's operations, one after the other")
    always_measured = spans_nodes = True

    def supports(self, request: NormRequest) -> Availability:
        if config := request.options["config"]:
            return Availability.no(f"it has no use for {', '.join(config)} of the config")
        return Availability.yes()

    def cost(self, request: NormRequest) -> float:
        moved = 2 * request.nbytes * (request.group_size - 1) / request.group_size
        return norm_s(request, launches=LAUNCHES, barriers=2, moved=moved, passes=8)

    def prepare(self, request: NormRequest, host: Host) -> _Plan:
        shape, region = request.shape, host.symmetric(request.nbytes)
        dtype: torch.dtype = getattr(torch, request.dtype)
        if region is None:
            total = scratch_of(host, "sum", request.rows * request.hidden, request.dtype)
        else:
            total = region.tensor[: request.nbytes].view(dtype)
        given, out = (shape, dense(shape), request.direct_in), (shape, dense(shape), region is not None)
        wanted = part_of(request, "all_reduce", given, out, reduction="sum")
        return _Plan(host.collective(wanted), total.view(shape), request.eps)

    def launch(
        self, plan: Any, out: torch.Tensor, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> None:  # fmt: skip
        with torch.no_grad():
            shape = plan.total.shape
            plan.collective.launch(plan.total, x.view(shape))
            stream = residual.view(shape)
            stream.copy_(stream.float() + plan.total.float())
            wide = stream.float()
            wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + plan.eps) * weight.float()
            if scales is not None:
                most = torch.finfo(out.dtype).max
                factors = wide.abs().amax(1, keepdim=True) / most
                scales.view(-1, 1).copy_(factors)
                wide = (wide / factors.where(factors > 0, 1)).clamp(-most, most)
            out.view(shape).copy_(wide)
