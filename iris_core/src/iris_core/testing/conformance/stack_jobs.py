"""Jobs that the stack suite runs on ranks: each returns the problems, as sentences; none if the backend is right.

Where the backend lacks an optional function, a job returns the name of the function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import DeviceTimeoutError
from iris_core.testing.conformance import oracle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LATE_S = 0.05  # how long one rank lets the others wait, in many turns


@dataclass(frozen=True)
class Setup:
    """Plugins of a suite and where they run, as ranks need them."""

    allocator: str
    backend: str
    device: str  # "cpu" or "cuda"
    ranks: int
    tested: str  # module of the programs of a stack, or name of the collective
    timeout_s: float | None = None  # bound of the waits in kernels
    in_float32: bool = True  # a collective adds up half-precision numbers in single precision
    check: tuple[str, ...] = ()  # what the checker looks for, see `Iris`

    def open(self) -> Any:
        """Open a context on this rank."""
        from iris_core import Iris

        places: dict[str, Any] = {"allocator": self.allocator, "backend": self.backend, "device": self.device}
        return Iris("64MiB", **places, device_timeout=self.timeout_s, check=self.check or None)


class Rank:
    """One rank of a stack: runs programs together with the others, and notes what is wrong afterwards.

    Attributes:
        problems: sentences.
    """

    def __init__(self, ctx: Any, stack: Setup) -> None:
        self.ctx = ctx
        self.programs: Any = importlib.import_module(stack.tested)
        self.timeout_s = stack.timeout_s
        self.me, self.world = ctx.cur_rank, ctx.num_ranks
        self.peer = (self.me + 1) % self.world
        self.problems: list[str] = []
        self._what = ""

    def note(self, problem: str) -> None:
        """Note what is wrong with the program that was run last."""
        self.problems.append(f"{self._what}, rank {self.me}: {problem}")

    def tensor(self, values: Sequence[int], dtype: str = "int32") -> torch.Tensor:
        """Allocate a symmetric tensor with these values on this rank."""
        out: torch.Tensor = self.ctx.empty(len(values), dtype=getattr(torch, dtype))
        return out.copy_(torch.tensor(values, dtype=out.dtype))

    @contextlib.contextmanager
    def together(self, what: str, slow: int | None = None) -> Iterator[None]:
        """Begin with the other ranks, except for a slow one (modulo the number of ranks), and wait for all at the end.

        A rank that does not wait for the slow one computes with old data.  Errors are noted: the other ranks go on.
        """
        self._what = what
        self.ctx.barrier()
        if slow is not None and self.me == slow % self.world:
            time.sleep(_LATE_S)
        try:
            yield
            if self.ctx.device != "cpu":
                torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - whatever a program raises; the others must not wait for this rank
            self.note(traceback.format_exc())
        try:
            self.ctx.barrier()
        except DeviceTimeoutError:  # raised after all ranks have arrived, so they stay in step
            self.note(traceback.format_exc())

    def read(self, tensor: torch.Tensor, rank: int) -> list[int]:
        """Return a rank's part of a symmetric tensor, as raw memory at a translated address shows it."""
        bases = self.ctx.heap.heap_bases
        there = bases[rank] + tensor.data_ptr() - bases[self.me]
        raw = oracle.read_bytes(there, tensor.nbytes, self.ctx.device)
        return torch.frombuffer(bytearray(raw), dtype=tensor.dtype).tolist()

    def check(self, tensor: torch.Tensor, expected: Sequence[list[int]]) -> None:
        """Compare a symmetric tensor with what it should be on each rank, as raw memory and as torch has it."""
        for rank, values in enumerate(expected):
            found = [(self.read(tensor, rank), "")]
            found += [(tensor.flatten().tolist(), " in torch")] * (rank == self.me)
            for got, where in found:
                wrong = [i for i, pair in enumerate(zip(got, values, strict=True)) if pair[0] != pair[1]]
                if wrong:
                    first = f"{got[wrong[0]]} instead of {values[wrong[0]]}"
                    self.note(f"memory of rank {rank}{where}: {len(wrong)} words, the first at {wrong[0]}: {first}")


@contextlib.contextmanager
def opened(stack: Setup) -> Iterator[Rank]:
    """Open a context, and leave it together."""
    with stack.open() as ctx:
        yield Rank(ctx, stack)
        ctx.barrier()  # others may look at this rank's memory until they are here


def give_up(stack: Setup) -> list[str] | str:
    """Wait in a kernel for a flag that no rank raises: the launch raises, or the next barrier does, once."""
    with opened(stack) as rank:
        if "DeviceContext" not in rank.ctx.backend.device_api():
            return "DeviceContext"  # only methods know where to report
        flag, found = (rank.tensor([0], "int64") for _ in range(2))
        rank.ctx.barrier()
        raised = []
        launch = functools.partial(rank.programs.await_flag, rank.ctx, "method", "ge", flag, 0, 1, found)
        for number, step in enumerate((lambda: launch(stack.timeout_s), rank.ctx.barrier, rank.ctx.barrier)):
            try:
                step()
            except DeviceTimeoutError:
                raised.append(number)
        if raised not in ([0], [1]):
            rank.note(f"of the launch and two barriers, DeviceTimeoutError was raised by {raised}, and not by 0 or 1")
        return rank.problems


def self_test(stack: Setup) -> tuple[list[Any], list[str]] | str:
    """Run the backend's self-test, as `iris doctor` does; return its checks, and the operations that it announced."""
    begun: list[str] = []
    with opened(stack) as rank:
        if not hasattr(rank.ctx.backend, "self_test"):
            return "self_test"
        return list(rank.ctx.backend.self_test(rank.ctx, lambda op, peer: begun.append(op))), begun
