"""The programs of `iris demo`, one module each; each is checked against torch on one process.

They are meant to be read: every module holds its kernel and the few lines of host code around it.
"""

from iris_core.types import Demo


def demos() -> tuple[Demo, ...]:
    """Return the programs in the order in which they are shown."""
    from iris_triton.demos import all_scatter, message_passing

    return (
        Demo("message-passing", "producer and consumer with flags", message_passing.run),
        Demo("gemm-all-scatter", "GEMM that stores its tiles to every rank", all_scatter.run),
    )
