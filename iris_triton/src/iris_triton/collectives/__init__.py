"""Algorithms for `ctx.ccl` (see docs/collectives.md).  Imports nothing until a backend asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iris_core.protocols import Collective

TABLES = Path(__file__).parent / "tables"
"""Folder with the tables that come with these algorithms, measured ones and models."""


def collectives(*, emulate_fast: bool = False) -> list[Collective]:
    """Return the algorithms.

    Args:
        emulate_fast: let those for NVIDIA serve ranks on the CPU, too, if they are named.
    """
    from iris_triton.collectives.accumulate import Atomic, Spinlock
    from iris_triton.collectives.copy_engine import ENGINE_OPS, CopyEngine
    from iris_triton.collectives.packets import fast_collectives
    from iris_triton.collectives.pull import MOVES, Pull
    from iris_triton.collectives.pull_reduce import PullReduce, PullTiles
    from iris_triton.collectives.push import FORMS, PUSHED, Push, PushReduce
    from iris_triton.collectives.ring import Ring
    from iris_triton.collectives.send_recv import Mail
    from iris_triton.collectives.two_shot import TwoShot

    return [
        TwoShot("all_reduce", "two_shot"),
        PullReduce("all_reduce", "one_shot"),
        Ring("all_reduce", "ring"),
        Atomic("all_reduce", "atomic"),
        Spinlock("all_reduce", "spinlock"),
        PullReduce("reduce_scatter", "pull"),
        PushReduce("reduce_scatter", "push"),
        PullTiles("reduce_scatter", "two_shot", ("tiles",)),
        PullReduce("reduce", "pull"),
        *(Pull(op, "pull", ("torch", "columns") if op == "all_to_all" else ("torch",)) for op in MOVES),
        *(Push(op, name) for op in PUSHED for name in FORMS),
        *(CopyEngine(op, "copy_engine") for op in ENGINE_OPS),
        Mail("send", "mailbox"),
        Mail("recv", "mailbox"),
        *fast_collectives(emulate=emulate_fast),
    ]
