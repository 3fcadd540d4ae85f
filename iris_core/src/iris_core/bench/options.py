"""What a run of benchmarks is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class RunOptions:
    """How to run; the same on every rank.  Axes whose values are functions are called with it.

    Attributes:
        num_ranks: ranks that are started for benchmarks with a context.
        device: "cpu" or "cuda"; None lets `Iris` choose.
        allocator: allocator by name.
        backend: device backend by name.
        heap_size: heap of each rank in bytes, or text such as "1GiB".
        quick: fewer points, for a first look and for tests.
        axes: values of axes by name, which replace those that the benchmarks declare.
        rounds: rounds in which every provider is measured once, where a benchmark does not say.
        warmup: calls before the timed ones of each round, where a benchmark does not say; None for one.
        repeat: timed calls of each round, where a benchmark does not say; None for as many as `batch_ms` holds.
        batch_ms: how long the timed calls of one round should take together, where a benchmark sets no number of calls.
        warm_ms: how long a GPU computes before each point, so that its clocks are up.
        device_timeout_s: bound of waits inside kernels (IRIS_DEVICE_TIMEOUT), unless the environment has one.
        limit_s: a rank that takes longer than this in all prints where it is and ends.
        context: class of the contexts that benchmarks get, "module:name"; it takes the arguments of `iris_core.Iris`.
        environ: variables that the ranks get, unless the environment has them.

    Raises:
        BenchmarkError: a number is out of range.
    """

    num_ranks: int = 1
    device: str | None = None
    allocator: str = "auto"
    backend: str = "auto"
    heap_size: int | str = "1GiB"
    quick: bool = False
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    rounds: int = 7
    warmup: int | None = None
    repeat: int | None = None
    batch_ms: float = 5.0
    warm_ms: float = 10.0
    device_timeout_s: float = 10.0
    limit_s: float = 600.0
    context: str = "iris_core.api:Iris"
    environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_ranks", "rounds"):
            if getattr(self, name) < 1:
                raise BenchmarkError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, least in (("warmup", 0), ("repeat", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BenchmarkError(f"{name} must be at least {least}, not {value}")
        for name in ("batch_ms", "device_timeout_s", "limit_s"):
            if getattr(self, name) <= 0:
                raise BenchmarkError(f"{name} must be more than 0, not {getattr(self, name)}")
        if self.warm_ms < 0:
            raise BenchmarkError(f"warm_ms must be 0 or more, not {self.warm_ms}")
