"""Values of axes as text: `--axis nbytes=pow2:1024:65536`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iris_core.bench.registry import linear_range, power_of_two
from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable


def parse_axis(text: str, powers: Callable[[int, int], list[int]] = power_of_two) -> tuple[str, list[Any]]:
    """Return name and values of NAME=VALUES.

    VALUES is a list 1,2.5,name (numbers where they are some), pow2:FIRST:LAST or lin:FIRST:LAST:STEP.

    Args:
        text: NAME=VALUES.
        powers: what pow2 means.

    Raises:
        BenchmarkError: it is none of these.
    """
    name, found, values = text.partition("=")
    if not found or not name.isidentifier() or not values:
        raise BenchmarkError(f"{text!r} is no axis: say NAME=VALUES, such as nbytes=1024,4096")
    return name, _values(text, values, powers)


def _values(text: str, values: str, powers: Callable[[int, int], list[int]]) -> list[Any]:
    kind, *bounds = values.split(":")
    makers: dict[str, tuple[Any, int]] = {"pow2": (powers, 2), "lin": (linear_range, 3)}
    if kind not in makers or not bounds:
        return [_value(each) for each in values.split(",")]
    make, count = makers[kind]
    try:
        numbers = [int(each) for each in bounds]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise BenchmarkError(f"{text!r}: say pow2:FIRST:LAST or lin:FIRST:LAST:STEP, in whole numbers")
    return list(make(*numbers))


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
