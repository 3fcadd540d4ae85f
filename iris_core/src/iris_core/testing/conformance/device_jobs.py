"""What the stack suite runs on ranks to call every device function, in one context for all."""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import DeviceTimeoutError
from iris_core.testing.conformance import device_functions as cases
from iris_core.testing.conformance.stack_jobs import Seen, Stack, look, open_stack, start

if TYPE_CHECKING:
    from collections.abc import Sequence

_LATE_S = 0.05  # there are many turns in which some rank is late


@dataclass
class Calls:
    """Effects of one device function on one rank."""

    seen: dict[str, Seen] = field(default_factory=dict)  # by the call's name
    errors: list[str] = field(default_factory=list)  # that calls raised


def call_all(stack: Stack, form: str) -> dict[str, Calls] | None:
    """Call every device function in one form; the results by name, or None for a backend without methods.

    A function that raises on this rank is a result as well: all ranks go on together with the next one.
    """
    with open_stack(stack) as ctx:
        if form == "method" and "DeviceContext" not in ctx.backend.device_api():
            return None
        run = _Run(ctx, importlib.import_module(stack.programs), form, stack.timeout_s)
        for name in cases.MOVES:
            run.move(name)
        for name in cases.ATOMICS:
            run.change(name)
            run.contend(name)
        for name in ("signal", "put_signal"):
            run.send(name)
        run.wait()
        for name in cases.LOOKS:
            run.look(name)
        run.barrier()
        return run.results


class _Run:
    def __init__(self, ctx: Any, programs: Any, form: str, timeout_s: float) -> None:
        self.ctx, self.programs, self.form, self.timeout_s = ctx, programs, form, timeout_s
        self.me, self.world = ctx.cur_rank, ctx.num_ranks
        self.peer = (self.me + 1) % self.world
        self.results = {name: Calls() for name in cases.NAMES}

    def tensor(self, values: list[int], dtype: str = "int32") -> Any:
        out = self.ctx.empty(len(values), dtype=getattr(torch, dtype))
        out.copy_(torch.tensor(values, dtype=out.dtype))
        return out

    def call(
        self,
        name: str,
        what: str,
        tensors: Sequence[Any],
        program: str,
        *arguments: Any,
        slow: int = -1,
        mine: bool = True,
    ) -> None:
        """Let all ranks, or those for which it is `mine`, call a program; look at what has become of the tensors."""
        calls = self.results[name]
        start(self.ctx, slow, _LATE_S)
        try:
            if mine:
                getattr(self.programs, program)(self.ctx, self.form, *arguments)
        except Exception:  # noqa: BLE001 - the others are told at the end; they must not wait for this rank
            calls.errors.append(f"{what}: {traceback.format_exc()}")
        try:
            self.ctx.barrier()
        except DeviceTimeoutError:  # raised when all ranks have met, so they stay in step
            calls.errors.append(f"{what}: {traceback.format_exc()}")
        calls.seen[what] = look(self.ctx, *tensors)

    def move(self, name: str) -> None:
        source, far = self.tensor(cases.source(self.me)), (self.me + 2) % self.world
        for kind in cases.KINDS:
            lanes = None if kind == "whole" else self.tensor(cases.mask(kind))
            target = self.tensor([cases.UNTOUCHED] * cases.LANES)
            self.call(name, kind, [target], "move", name, source, target, lanes, cases.OTHER, self.peer, far)

    def change(self, name: str) -> None:
        operands, compares = self.tensor(cases.operands(self.me)), self.tensor(cases.compares(self.me, self.world))
        for kind in cases.KINDS:
            lanes = None if kind == "whole" else self.tensor(cases.mask(kind))
            cells, found = self.tensor(cases.cells(self.me)), self.tensor([cases.UNTOUCHED] * cases.LANES)
            arguments = cells, operands, compares, found, lanes, self.peer
            self.call(name, kind, [cells, found], "change", name, *arguments)

    def contend(self, name: str) -> None:
        cell = self.tensor([cases.first(name)], "int64")
        operands = self.tensor(cases.contributions(name, self.me), "int64")
        found = self.tensor([cases.UNTOUCHED] * (self.world * cases.PROGRAMS), "int64")
        expected = self.tensor(cases.expectations(self.me), "int64")
        arguments = cell, operands, expected, found
        self.call(name, "contention", [cell, found], "contend", name, *arguments)

    def send(self, name: str) -> None:
        source = self.tensor(cases.source(self.me))
        for turn, op in enumerate(cases.OPS):
            target, found = (self.tensor([cases.UNTOUCHED] * cases.LANES) for _ in range(2))
            flag = self.tensor([cases.FLAG], "int64")
            awaited = cases.signalled(op, self.me, self.world)
            arguments = op, source, target, found, flag, cases.sent(self.me), awaited, self.timeout_s
            self.call(name, op, [flag, target, found], "send", name, *arguments, slow=turn % self.world)

    def wait(self) -> None:
        for turn, each in enumerate(cases.WAITS):
            flag, found = self.tensor([each.before], "int64"), self.tensor([cases.UNTOUCHED], "int64")
            arguments = each.cmp, flag, each.sent, each.value, found, self.timeout_s
            self.call("wait", each.cmp, [flag, found], "await_flag", *arguments, slow=turn % self.world)

    def look(self, name: str) -> None:
        for turn, each in enumerate(cases.WAITS):
            flags = self.tensor([each.before, each.before if name == "wait_any" else each.sent], "int64")
            found = self.tensor([cases.UNTOUCHED] * 2, "int64")
            arguments = name, each.cmp, flags, each.sent, each.value, found, self.timeout_s
            self.call(name, each.cmp, [flags, found], "look", *arguments, slow=turn % self.world)

    def barrier(self) -> None:
        for group in (None, *cases.groups(self.world)):
            begin, stride, size = group or (0, 1, self.world)
            members = range(begin, begin + stride * size, stride)
            slots, found = (self.tensor([cases.UNTOUCHED] * self.world, "int64") for _ in range(2))
            flags = self.tensor([0] * (self.world + 1), "int64")
            for turn in range(2):
                arguments = slots, found, flags, 10 * (turn + 1) + self.me, group, self.timeout_s
                late, mine = members[turn % size], self.me in members
                self.call("barrier", f"{group} {turn}", [slots, found, flags], "meet", *arguments, slow=late, mine=mine)
