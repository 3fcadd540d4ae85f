"""A second stream for copy engines, beside the one of the caller: how they wait for each other, and for peers' copies.

The second stream has higher priority on multiprocessors, which only its barrier needs: a product does not delay it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from iris_core.types import DeviceTarget, DeviceType
from iris_triton.collectives.parts.collective import bind_alone
from iris_triton.copies import copier, flag_writer, handles
from iris_triton.language.flags import await_flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.dispatch.team import Team

WORD_NBYTES = 4
_WORDS_NBYTES = 256  # memory for words is asked for in multiples of it, so that few sizes are there


@triton.jit(do_not_specialize=("index", "rank", "timeout_ns", "status"))
def await_word(words, index, rank, timeout_ns, status):
    """Wait until one of some int32 words is 1, and clear it; later work of the stream sees the data before the flag."""
    word = words + index
    one = tl.cast(index, tl.int32) * 0 + 1
    await_flag(word, one, "eq", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    tl.store(word, 0)


def words_of(team: Team, name: str, number: int) -> torch.Tensor:
    """Return int32 words of symmetric memory, a region by its name, for `await_word`: 0 between calls.  Collective."""
    nbytes = number * WORD_NBYTES
    return team.region(name, -(-nbytes // _WORDS_NBYTES) * _WORDS_NBYTES).tensor[:nbytes].view(torch.int32)


@dataclass(slots=True)
class Side:
    """The second stream; on the CPU there is none, and copies are synchronous."""

    barrier: Callable[[Any], None]
    copy: Callable[[Any, Any, int, Any], None]  # see `iris_triton.copies.copier`, `flag_writer` and `handles`
    write: Callable[[Any, int, int, Any], None]
    address: Callable[[int], Any]
    stream: Any = None  # of torch
    raw: Any = 0  # its handle for `copy`
    ready: Any = None  # the event that one stream waits for after the other
    main_raw: int | None = None  # handle of the last main stream, by which it is found: torch takes 5 us for it
    main: Any = None

    @classmethod
    def of(cls, team: Team, target: DeviceTarget) -> Side:
        """Make a second stream of a device, whose barrier is that of a team."""
        device = target.type
        address, raw = handles(device)
        side = cls(bind_alone(team), copier(device), flag_writer(device), address)
        if device is not DeviceType.CPU:
            side.stream = torch.cuda.Stream(target.index, priority=-1)  # before all that say nothing
            side.raw, side.ready = raw(side.stream.cuda_stream), torch.cuda.Event()
        return side

    def current(self) -> Any:
        """Return the main stream."""
        raw = torch._C._cuda_getCurrentRawStream(self.stream.device_index)
        if raw != self.main_raw:
            self.main_raw, self.main = raw, torch.cuda.current_stream(self.stream.device)
        return self.main

    def wait(self) -> None:
        """Make the second stream wait for earlier work of the main stream."""
        if self.stream is not None:
            self.ready.record(self.current())
            self.ready.wait(self.stream)

    def follow(self) -> None:
        """Make the second stream wait for earlier work of the main stream, then for the barrier."""
        self.wait()
        self.barrier(self.stream)

    def join(self) -> None:
        """Make the main stream wait for the second stream."""
        if self.stream is not None:
            self.ready.record(self.stream)
            self.ready.wait(self.current())
