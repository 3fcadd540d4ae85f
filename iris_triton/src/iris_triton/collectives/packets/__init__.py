"""Collectives for NVIDIA GPUs: packets that carry the proof of their own arrival, instead of meetings.

docs/collectives.md says what they are for, and on what they lean.  Imports nothing until it is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iris_core.protocols import Collective


def fast_collectives(*, emulate: bool = False) -> list[Collective]:
    """Return the algorithms.

    Args:
        emulate: let them serve ranks on the CPU, too: for tests.
    """
    from iris_triton.collectives.packets.base import ENCODINGS
    from iris_triton.collectives.packets.exchange import Exchange
    from iris_triton.collectives.packets.packet_ring import Ring
    from iris_triton.collectives.packets.split import Split

    packets = (
        ("all_reduce", "one_shot"),
        ("all_reduce", "two_shot"),
        ("reduce_scatter", "mailbox"),
        ("all_gather", "mailbox"),
        ("all_to_all", "mailbox"),
    )
    moves = ("all_gather", "all_to_all")  # whose NaNs must keep their bits
    return [
        *(
            Exchange(op, form, encoding, emulate=emulate)
            for op, form in packets
            for encoding in ENCODINGS
            if not (encoding == "sentinel" and op in moves)
        ),
        *(Split(op, encoding, emulate=emulate) for op in ("all_reduce", "reduce_scatter") for encoding in ENCODINGS),
        *(Ring(op, emulate=emulate) for op in ("all_reduce", "reduce_scatter")),
    ]
