"""`iris tune`: which algorithm is the fastest on this machine, measured on verified data."""

from collections.abc import Sequence

from iris_core.dispatch import FP8, PLAIN, TF32
from iris_core.errors import ArgumentError
from iris_core.settings import nearest

DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "int32", "int64")
FUSED_DTYPES = (*PLAIN, TF32, *FP8)
"""Element types that can be measured: of collectives, which can hold the samples, and of products."""


def check_names(option: str, given: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each once; ArgumentError where one is not known, with the nearest one."""
    for name in given:
        if name not in known:
            raise ArgumentError(f"{option}: {name!r} cannot be measured{nearest(name, known)}")
    return tuple(dict.fromkeys(given))
