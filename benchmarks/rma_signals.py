"""What the latencies of benchmarks/rma.py are made of: two ranks that signal each other in turn.

Either inside one kernel, or by the copy engine: eight bytes that it copies behind a kernel, for which a kernel of the
peer waits.  The engine does not act on its own, so a turn of it holds a copy and a kernel, in one CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import rma_kernels as kernels
import torch
from rma_copies import engine_copy, engine_is_missing

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core import Iris
    from iris_core.bench import State

ENGINE_ROUNDS = 50
"""Round trips in one call of the engine's provider: two nodes of a graph in each."""


def declare_signals(state: State, ctx: Iris, first: int, second: int, sem: str) -> None:
    """Declare "engine" and "signal" for two ranks; the others take no part.  Times are those of one way.

    Args:
        state: of the benchmark.
        ctx: the context.
        first: the rank that begins.
        second: the other one.
        sem: "relaxed", or "release" for signals that hand data over.
    """
    state.set_repeat(2)
    engine = EngineTurns(ctx, first, second, ENGINE_ROUNDS, engine_copy)
    reason = engine_is_missing() if state.on_gpu else "the copy engine needs a GPU"
    if reason:
        state.skip_provider("engine", reason)
    else:
        state.set_timer("graph")
        engine.declare(state, "engine")
        state.set_timer("events")
    rounds = 1000 if state.on_gpu else 5
    turns = _Turns(ctx, first, second)
    receive = "relaxed" if sem == "relaxed" else "acquire"

    def play() -> None:
        kernels.ping_pong[(1,)](
            turns.flag, turns.epoch, turns.context, ctx.num_ranks, rounds, turns.peer, int(turns.begins),
            SEND=sem, RECEIVE=receive, num_warps=1,
        )  # fmt: skip

    call = play if turns.takes_part else None
    baseline = "" if reason else "engine"
    state.provider("signal", call, check=turns.all_came, prepare=turns.note, baseline=baseline, operations=2 * rounds)


class _Turns:
    """A flag for each rank, and how many signals it has waited for."""

    def __init__(self, ctx: Iris, first: int, second: int) -> None:
        self.begins = ctx.cur_rank == first
        self.takes_part = ctx.cur_rank in (first, second)
        self.peer = second if self.begins else first
        self.context = ctx.get_device_context()
        # all of it on the heap: on CPU ranks whatever a kernel touches has to be there
        self.flag, self.epoch = ctx.zeros(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
        self._before = 0

    def note(self) -> None:
        """Remember where we are, to see that the calls do something."""
        self._before = int(self.epoch)

    def all_came(self) -> bool:
        """Whether the calls since `note` waited for the peer's signals and got the last one; nobody else got any."""
        return int(self.epoch) == int(self.flag) and (int(self.epoch) > self._before) == self.takes_part


class EngineTurns(_Turns):
    """Signals that are copies of eight bytes.

    Args:
        ctx: the context.
        first: the rank that begins.
        second: the other one.
        rounds: round trips in a call.
        copy: copies (target address, source address, bytes) on the current stream.
    """

    def __init__(
        self, ctx: Iris, first: int, second: int, rounds: int, copy: Callable[[int, int, int], object]
    ) -> None:
        super().__init__(ctx, first, second)
        self.outbox = ctx.zeros(1, dtype=torch.int64)  # what is sent next
        self.outbox.fill_(int(self.begins))
        self._there = ctx.heap.translate(self.flag.data_ptr(), ctx.cur_rank, self.peer)
        self._world_size, self._rounds, self._copy = ctx.num_ranks, rounds, copy

    def declare(self, state: State, name: str) -> None:
        """Declare this as a provider that others are compared with."""
        call = self.play if self.takes_part else None
        state.provider(name, call, check=self.all_came, prepare=self.note, peer=True, operations=2 * self._rounds)

    def play(self) -> None:
        """Take all turns."""
        for _ in range(self._rounds):
            if self.begins:
                self._send()
                self._take_turn()
            else:
                self._take_turn()
                self._send()

    def _send(self) -> None:
        self._copy(self._there, self.outbox.data_ptr(), 8)

    def _take_turn(self) -> None:
        # who begins is one signal ahead: it sends the next number, the other one the number that came
        kernels.take_turn[(1,)](
            self.flag, self.epoch, self.outbox, self.context, self._world_size, int(self.begins), num_warps=1
        )
