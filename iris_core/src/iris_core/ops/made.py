"""What the objects of `ctx.ops` that are made once have in common: agreement, memory that peers reach, checks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from iris_core.device.targets import on_device
from iris_core.dispatch.bind import Binder
from iris_core.dispatch.requests import check_fits, check_strided, check_tensors, share_memory
from iris_core.errors import ArgumentError, CapabilityError, UnsupportedError
from iris_core.heap.streams import uncompiled

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

_ALIGNMENT_NBYTES = 256
_KINDS: dict[str, tuple[Any, str]] = dict.fromkeys(("dtype", "result"), (torch.dtype, "a torch.dtype"))
_KINDS["scale"] = (int | float, "a number")
_OPTIONAL = "scale", "pieces"
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
"""Element types of results."""


class Made:
    """An object that all members of a group make with equal arguments, and call equally often in the same order."""

    _unfused: ClassVar[Any] = None  # makes what stands for the backend's kernels where ranks are on several nodes

    def __init_subclass__(cls) -> None:  # compiled code breaks at their methods
        for name, each in list(vars(cls).items()):
            if callable(each) and (name == "__call__" or not name.startswith("_")):
                setattr(cls, name, uncompiled(each))

    @contextmanager
    def _agreement(self, name: str, given: dict[str, Any]) -> Iterator[tuple[int, ...]]:
        """Agree with the members on making it; `given` are the arguments by name, the body checks them.

        What one member refuses, all refuse: CapabilityError where the backend has no kernels, UnsupportedError where
        ranks are on several nodes or memory is exhausted, RankMismatchError where arguments differ, and what the body
        raises.
        """
        binder: Binder = given["binder"]
        self._binder, self._name = binder, name
        self._members: tuple[int, ...] = binder.members_of(given["group"])
        self._facts = {each: given[each] for each in given if each not in ("self", "binder", "group")}
        try:
            self._backend: Any = binder.open().backend
            if not hasattr(self._backend, "group_kernels"):
                raise CapabilityError(f"{name}: backend {self._backend.info.name!r} has no kernels for it")
            for each, value in self._facts.items():
                kind, what = _KINDS.get(each, (int, "a whole number"))
                if not isinstance(value, kind) and (value is not None or each not in _OPTIONAL):
                    raise ArgumentError(f"{name}: {each} must be {what}, not {value!r}")
            yield self._members
            self._spans_nodes = len(set(binder.here.nodes_of(self._members))) > 1
            if self._spans_nodes and self._unfused is None:
                raise UnsupportedError(f"{name}: the ranks are on several nodes, and kernels reach those of one only")
        except Exception as error:  # noqa: BLE001 - raised again, on all members
            binder.refuse(name, error, self._members)
        texts = {each: str(value).removeprefix("torch.") for each, value in self._facts.items()}
        binder.members.compare(self._members, {"operation": name, **texts})

    def _kernels_for(self, space: Any, shared: Shapes) -> Any:
        """Return the backend's kernels for a space, to which this adds where they run: see `experts.Workspace`.

        It also gets tensors of zeros that peers reach, by name: `shared`, in one region of the heap.  Collective.
        """
        binder, members = self._binder, self._members
        sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT_NBYTES) for shape, dtype in shared.values()]
        begins = [each * _ALIGNMENT_NBYTES for each in itertools.accumulate(sizes, initial=0)]
        space.size, space.me, space.units = len(members), members.index(binder.rank), binder.here.processors
        with on_device(binder.target), torch.inference_mode(False):  # whatever mode later calls are made in
            context: Any = binder.open()
            if self._spans_nodes:
                return self._unfused(context.ccl, members, space)
            space.world, space.context = context.num_ranks, context.get_device_context()
            space.members = torch.tensor(members, dtype=torch.int32, device=binder.target.torch_device)
            world, what = binder.members.world.subworld(members), f"an object of ctx.ops.{self._name}"
            region = binder.heap.take_region(world, members, begins[-1], what).tensor
            for begin, (name, (shape, dtype)) in zip(begins, shared.items(), strict=False):
                tensor = region[begin : begin + math.prod(shape) * dtype.itemsize]
                setattr(space, name, tensor.view(dtype).view(shape))
            return self._backend.group_kernels(self._name, space)

    def _check_each(self, what: str, wanted: dict[str, Any], rows: tuple[str, ...] = ()) -> None:
        """Raise unless all are tensors that fit; see `iris_core.dispatch.requests.check_fits`."""
        self._binder.open()
        for name, (each, _, _) in wanted.items():
            check_strided(what, name, each)
        check_tensors(what, self._binder.here, **{name: each for name, (each, _, _) in wanted.items()})
        check_fits(what, wanted, rows)

    def _check_apart(self, what: str, out: torch.Tensor, others: dict[str, torch.Tensor]) -> None:
        """Raise ArgumentError if the output has an element in common with what is read."""
        for name, each in others.items():
            if share_memory(out, each):
                raise ArgumentError(f"{what}: out and {name} share memory; it does not work in place")

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # a copied layer shares it, as layers do
