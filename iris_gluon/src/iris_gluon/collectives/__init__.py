"""Algorithms in Gluon for `ctx.ccl` (see docs/collectives.md).  Imports nothing until a backend asks for them."""

from iris_core.protocols import Collective


def collectives() -> list[Collective]:
    """Return the algorithms."""
    from iris_gluon.collectives.all_reduce import TwoShot
    from iris_gluon.collectives.push import Push

    return [
        Push("all_gather", "gluon_push"),
        Push("all_to_all", "gluon_push", ("torch", "columns")),
        TwoShot("all_reduce", "gluon_two_shot"),
    ]
