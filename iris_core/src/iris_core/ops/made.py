"""What the objects of `ctx.ops` that are made once have in common: agreement, memory that peers reach, checks."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.requests import check_fits, check_tensors, check_unrecorded
from iris_core.errors import CapabilityError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.dispatch.bind import Binder
    from iris_core.types import Group

    Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

_ALIGNMENT_NBYTES = 256
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
"""Element types of results."""


class Made:
    """An object that all members of a group make with equal arguments, and call equally often in the same order.

    What one member refuses, all refuse: CapabilityError where the backend has no kernels, UnsupportedError where ranks
    are on several nodes or memory is exhausted, RankMismatchError where arguments differ, and what `check` raises.

    Args:
        binder: of the context.
        name: of the operation; the backend's `group_kernels` knows it.
        group: the ranks.
        facts: the arguments by name.
        check: gets the members, and raises ArgumentError or UnsupportedError.
    """

    def __init__(
        self, binder: Binder, name: str, group: Group, facts: dict[str, Any],
        check: Callable[[tuple[int, ...]], None],
    ) -> None:  # fmt: skip
        members = binder.members_of(group)
        try:
            backend: Any = binder.open().backend
            if not hasattr(backend, "group_kernels"):
                raise CapabilityError(f"{name}: backend {backend.info.name!r} has no kernels for it")
            check(members)
            if len(set(binder.here.nodes_of(members))) > 1:
                raise UnsupportedError(f"{name}: the ranks are on several nodes, and kernels reach those of one only")
        except Exception as error:  # noqa: BLE001 - raised again, on all members
            binder.refuse(name, error, members)
        texts = {key: str(value).removeprefix("torch.") for key, value in facts.items()}
        binder.members.agree(members, {"operation": name, **texts})
        self._binder, self._name, self._members, self._backend = binder, name, members, backend

    def _take(self, shared: Shapes) -> dict[str, torch.Tensor]:
        """Make tensors of zeros that peers reach, in one region of the heap."""
        sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT_NBYTES) for shape, dtype in shared.values()]
        begins = [each * _ALIGNMENT_NBYTES for each in itertools.accumulate(sizes, initial=0)]
        region = self._binder.take(self._members, begins[-1], f"an object of ctx.ops.{self._name}")
        return {
            name: region[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (name, (shape, dtype)), begin in zip(shared.items(), begins[:-1], strict=True)
        }

    def _place(self) -> dict[str, Any]:
        """Return what all kernels need to know about where they run; see `iris_core.ops.experts.Workspace`."""
        context, binder = self._binder.open(), self._binder
        members = torch.tensor(self._members, dtype=torch.int32, device=binder.target.torch_device)
        return {
            "world": context.num_ranks, "size": len(members), "me": self._members.index(binder.rank),
            "units": binder.processors, "members": members, "context": context.get_device_context(),
        }  # fmt: skip

    def _check_each(self, what: str, wanted: dict[str, Any], rows: tuple[str, ...] = ()) -> None:
        """Raise unless tensors fit; see `iris_core.dispatch.requests.check_fits`."""
        self._binder.open()
        given = {name: each for name, (each, _, _) in wanted.items()}
        check_tensors(what, self._binder.here, **given)
        check_unrecorded(what, *given.values())
        check_fits(what, wanted, rows)

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # a copied layer shares it, as layers do
