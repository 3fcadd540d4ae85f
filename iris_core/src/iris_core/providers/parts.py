"""Parts of operations: collectives that are parts of them, contiguous tensors, and what is under way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from iris_core.device.launch_order import Begun
from iris_core.dispatch.requests import nodes_of
from iris_core.dispatch.team import Host
from iris_core.types import Availability, CollectiveRequest, FusedRequest, NormRequest

PARTED_IN, PARTED_OUT = ("reduce_scatter", "all_to_all", "scatter"), ("all_gather", "all_to_all", "gather")
"""Collectives whose inputs, or outputs, have a part for each member."""

Side = tuple[tuple[int, ...], tuple[int, ...], bool]
"""Of an input or output: shape, strides, and whether peers can address it."""


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor is contiguous; strides of dimensions of one element are never used."""
    return all(n == 1 or at == own for n, at, own in zip(shape, stride, dense(tuple(shape)), strict=True))


def part_of(
    request: FusedRequest | CollectiveRequest | NormRequest, op: str, inp: Side | None, out: Side | None,
    among: Sequence[int] | None = None, **options: Any,
) -> CollectiveRequest:  # fmt: skip
    """Describe a collective that is a part of an operation, as `CollectiveCall.describe` would.

    `request` is that of the operation, `among` the members that take part, by their numbers in the group; None for all.
    """
    dtype = request.dtype
    if isinstance(request, FusedRequest) and request.op != "all_gather_matmul":
        dtype = request.out_dtype
    shape = (inp or out or ((), (), False))[0]
    usual: dict[str, Any] = {"layout": "torch", "in_place": False, "uneven": False, "config": {}}
    usual |= {} if inp is None else {"in_stride": inp[1]}
    usual |= {} if out is None else {"out_shape": out[0], "out_stride": out[1]}
    chosen = range(request.group_size) if among is None else among
    return CollectiveRequest(
        op=op,
        shape=shape,
        dtype=dtype,
        nbytes=math.prod(shape) * getattr(torch, dtype).itemsize,
        rank=chosen.index(request.rank),
        group_size=len(chosen),
        target=request.target,
        options={**usual, **options},
        members=tuple(request.members[each] for each in chosen),
        direct_in=inp is not None and inp[2],
        direct_out=out is not None and out[2],
        nodes=tuple(request.nodes[each] for each in chosen) if request.nodes else (),
    )


@dataclass(slots=True)
class Staged:
    """A tensor of a call as contiguous elements: its own memory, or a copy with its parts in another order."""

    buffer: torch.Tensor | None = None  # memory of the copy, of one dimension; None where the tensor itself serves
    # which part of the tensor each part of the copy is; None if it is copied as a whole
    order: Sequence[int] | None = None
    splits: Sequence[int] | None = None  # rows of the tensor's parts, where they differ
    is_columns: bool = False  # whether parts are chunks of columns, and not of rows

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the contiguous elements, of one dimension."""
        return tensor.as_strided((tensor.numel(),), (1,)) if self.buffer is None else self.buffer

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same, with the tensor's values."""
        if self.buffer is not None:
            for copy, part in self._pairs(tensor, self.buffer):
                copy.copy_(part)
        return self.flat(tensor)

    def drain(self, tensor: torch.Tensor) -> None:
        """Copy back what is in the buffer."""
        if self.buffer is not None:
            for copy, part in self._pairs(tensor, self.buffer):
                part.copy_(copy)

    def _pairs(self, tensor: Any, buffer: Any) -> list[tuple[Any, Any]]:
        if self.order is None:
            return [(buffer.view(tensor.shape), tensor)]
        parts: Sequence[torch.Tensor]
        if self.splits is not None:
            parts = tensor.split(list(self.splits))
        elif self.is_columns:
            parts = tensor.chunk(len(self.order), dim=1)
        else:
            parts = tensor.unflatten(0, (len(self.order), -1)).unbind()
        ordered = [parts[place] for place in self.order]
        copies = buffer.split([part.numel() for part in ordered])
        return [(copy.view(part.shape), part) for copy, part in zip(copies, ordered, strict=True)]


def scratch_of(host: Host, what: str, count: int, dtype: str) -> torch.Tensor:
    """Return local memory for some elements, of one dimension; see `Host.scratch`."""
    kind = getattr(torch, dtype)
    nbytes = count * kind.itemsize
    return host.scratch(nbytes, what)[:nbytes].view(kind)


def staged(
    host: Host, what: str, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...] | None,
    order: Sequence[int] | None, splits: Sequence[int] | None = None, is_columns: bool = False,
) -> Staged:  # fmt: skip
    """Say how to pass a tensor on: itself, or a copy in scratch memory; without strides there is no tensor."""
    if order is None and stride is not None and is_dense(shape, stride):
        return Staged()
    return Staged(scratch_of(host, what, math.prod(shape), dtype), order, splits, is_columns)


class Composed:
    """A collective between nodes that is made of others."""

    spans_nodes = composes = True
    fields: tuple[str, ...] = ()  # fields of a config that it has a use for

    begin: Callable[..., Begun]

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, request: CollectiveRequest) -> Availability:
        if len(nodes_of(request)) < 2:
            return Availability.no("it is offered between nodes only")
        if unused := [name for name in request.options.get("config", {}) if name not in self.fields]:
            return Availability.no(f"it has no use for {', '.join(unused)} of the config")
        if request.options.get("layout", "torch") != "torch":
            return Availability.no("it divides tensors along the first dimension")
        problem = self._problem(request)
        return Availability(not problem, problem)

    def _problem(self, request: CollectiveRequest) -> str:
        """Return why it cannot serve such a request; empty if it can."""
        raise NotImplementedError

    def launch(self, plan: Any, out: Any, inp: Any, stream: Any = None) -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self.begin(plan, out, inp).wait()
