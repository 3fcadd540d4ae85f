"""Algorithms for `ctx.ccl` (see docs/collectives.md).  Imports nothing until a backend asks for them."""

from pathlib import Path

from iris_core.protocols import Collective

TABLES = Path(__file__).parent / "tables"  # that come with these algorithms, measured ones and models


def collectives(*, packets: bool = True) -> list[Collective]:
    """Return the algorithms, also those of `packets`, for NVIDIA GPUs."""
    from iris_triton.collectives.copy_engine import COPIED, CopyEngine
    from iris_triton.collectives.nvls import Nvls
    from iris_triton.collectives.pull import MOVES, Pull
    from iris_triton.collectives.pull_reduce import PullReduce
    from iris_triton.collectives.push import PUSHED, Push
    from iris_triton.collectives.send_recv import Mail
    from iris_triton.collectives.two_shot import TwoShot

    return [
        TwoShot("all_reduce", "two_shot"),
        PullReduce("all_reduce", "one_shot"),
        PullReduce("reduce_scatter", "pull"),
        PullReduce("reduce_scatter", "two_shot", "tiles"),
        PullReduce("reduce", "pull"),
        *(Pull(op, "pull", ("torch", "columns") if op == "all_to_all" else ("torch",)) for op in MOVES),
        *(Push(op, name) for op in PUSHED for name in ("push", "persistent")),
        *(CopyEngine(op, "copy_engine") for op in COPIED),
        Mail("send", "mailbox"),
        Mail("recv", "mailbox"),
        Nvls("all_reduce", "nvls_two_shot"),
        *(Nvls(op, "nvls") for op in ("reduce_scatter", "all_gather")),
        *(fast_collectives() if packets else ()),
    ]


def fast_collectives() -> list[Collective]:
    """Return those for NVIDIA GPUs."""
    from iris_triton.collectives.packets.exchange import Exchange
    from iris_triton.collectives.packets.split import Split

    exchanges = (
        ("all_reduce", "one_shot", ("ll", "ll128", "sentinel")),
        ("all_reduce", "two_shot", ("ll128", "sentinel")),
        ("reduce_scatter", "mailbox", ("ll", "ll128", "sentinel")),
        ("all_gather", "mailbox", ("ll", "ll128")),  # its NaNs must keep their bits, and so must those of all_to_all
        ("all_to_all", "mailbox", ("ll", "ll128")),
        ("reduce", "mailbox", ("ll", "ll128", "sentinel")),
        *((op, "mailbox", ("ll", "ll128")) for op in ("broadcast", "gather", "scatter")),
    )
    return [*(Exchange(op, form, encoding) for op, form, encodings in exchanges for encoding in encodings), Split()]
