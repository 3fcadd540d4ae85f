"""Iris as scripts of the reference system know it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from iris_core import api
from iris_core.device.targets import same_device
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.logs import logger
from iris_triton.rocm_iris.collectives import PortedCollectives
from iris_triton.rocm_iris.operations import PortedOperations
from iris_triton.rocm_iris.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    import torch.distributed as dist

_ENGINES = ("sdma",)
_ALLOCATORS = {"torch": "torch", "vmem": "vmem", "vmem_chunked": "vmem"}
"""Allocators there, all for GPUs, and which does their job here."""


def _without_sizes(name: str) -> Any:
    """A factory that makes a tensor without dimensions where it is called without a size."""
    factory = getattr(api.Iris, name)

    @functools.wraps(factory)
    def make(self: Iris, *sizes: Any, **options: Any) -> torch.Tensor:
        return cast("torch.Tensor", factory(self, *(sizes if sizes or "size" in options else ((),)), **options))

    return make


class Iris(api.Iris):
    """`iris_core.Iris` with the reference system's constructor, its `ccl` and `ops`, and names of its own.

    Collective: every rank of the world constructs it with the same arguments.

    What allocates ends with `barrier()`, after the memory is filled: every factory without `out`, `allocate`,
    `allocate_symmetric` and `as_symmetric`.  IRIS_TRITON__ALLOCATION_BARRIER=0, or
    `options={"triton": {"allocation_barrier": False}}`, leaves it out, for programs that synchronise by themselves.

    Args:
        heap_size: bytes of each rank's heap, as a number or "64MiB"; IRIS_HEAP_SIZE or 1 GiB by default.
        allocator_type: allocator by name; "vmem_chunked" is "vmem", and where ranks compute on the CPU the names of
            the reference system mean "host", with a warning.  "auto": IRIS_ALLOCATOR, then the best usable one.
        engines: copy engines; there are none, so anything but None or nothing is refused.
        allocator: the same as `allocator_type`, as `iris_core.Iris` has it.
        backend: device backend by name.
        device, group, options: as in `iris_core.Iris`.

    Raises:
        ArgumentError: (a ValueError) an engine that nobody knows, or two allocators.
        UnsupportedError: (a RuntimeError) a copy engine was asked for.
        PluginNotFoundError: (a ValueError) there is no such allocator; lists those that are installed.
        IrisError: everything else that `iris_core.Iris` raises.

    Example:
        >>> import iris_triton as iris
        >>> ctx = iris.Iris(1 << 20)  # doctest: +SKIP
    """

    _collectives: ClassVar[type[PortedCollectives]] = PortedCollectives
    _operations: ClassVar[type[PortedOperations]] = PortedOperations
    _tracer: ClassVar[type[Tracing]] = Tracing

    comm: None = None
    """There is no communicator of MPI; `torch.distributed` has what it was used for."""

    copy_engines_device_ctx: None = None
    """There are no copy engines in kernels."""

    def __init__(
        self,
        heap_size: int | str | None = None,
        allocator_type: str = "auto",
        engines: str | Iterable[str] | None = (),
        *,
        allocator: str = "auto",
        backend: str = "triton",
        device: str | torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        _check_engines(engines)
        if allocator != "auto" and allocator_type not in ("auto", allocator):
            raise ArgumentError(f"two allocators: allocator_type={allocator_type!r} and allocator={allocator!r}")
        on_cpu = is_simulation_env() if device is None else str(device).startswith("cpu")
        name = allocator if allocator != "auto" else allocator_for(allocator_type, on_cpu)
        super().__init__(heap_size, allocator=name, backend=backend, device=device, group=group, options=options)
        self.ops.meet = self.ccl.meet

    @property
    def ccl(self) -> PortedCollectives:
        """The collectives, with the reference system's layouts; see `iris_triton.rocm_iris.collectives`."""
        return cast("PortedCollectives", super().ccl)

    @property
    def ops(self) -> PortedOperations:
        """Products fused with communication; see `iris_triton.rocm_iris.operations`."""
        return cast("PortedOperations", super().ops)

    zeros, ones, empty, rand, randn = map(_without_sizes, ("zeros", "ones", "empty", "rand", "randn"))

    # -- who and where ------------------------------------------------------------------------------------------------
    @property
    def heap_size(self) -> int:
        """Bytes of each rank's heap that were asked for; `heap.usable_nbytes` has them rounded up."""
        return int(self.settings.heap_size)

    def get_device(self) -> torch.device:  # type: ignore[override]
        """Return this rank's device; `device` is its name."""
        import torch

        return torch.device(self.device)

    # -- synchronisation ----------------------------------------------------------------------------------------------
    def barrier(self, stream: Any = None, group: dist.ProcessGroup | None = None) -> None:
        """Finish this rank's device work and its asynchronous operations, then wait; see `iris_core.Iris.barrier`."""
        self._join(stream)
        super().barrier(stream, group)

    def device_barrier(
        self, group: dist.ProcessGroup | None = None, *, stream: Any = None, sem: str = "release"
    ) -> None:
        """Let this rank's device wait for the others', its asynchronous operations included; see `iris_core.Iris`."""
        self._join(stream)
        super().device_barrier(group, stream=stream, sem=sem)

    def _join(self, stream: Any) -> None:
        if stream is None or not hasattr(stream, "cuda_stream"):
            self.ccl.under_way.join()
            self.ops.under_way.join()
            return
        import torch

        with torch.cuda.stream(stream):
            self.ccl.under_way.join()
            self.ops.under_way.join()

    def broadcast(
        self, value: Any, src: int = 0, *, source_rank: int | None = None, src_rank: int | None = None
    ) -> Any:
        """Return rank `src`'s value on every rank; see `iris_core.Iris.broadcast`.

        Args:
            value: what is sent.
            src: the rank whose value it is.
            source_rank, src_rank: older names of `src`.
        """
        return super().broadcast(value, src, source_rank=source_rank if src_rank is None else src_rank)

    # -- memory: a script there writes, allocates and launches, so what allocates ends with a barrier -----------------
    def allocate_symmetric(self, *size: Any, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an uninitialised tensor and its address on every rank, after a barrier; see `iris_core.Iris`."""
        made = super().allocate_symmetric(*size, dtype=dtype)
        self._end_allocation()
        return made

    def as_symmetric(self, external: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the heap with the content of `external`, after a barrier; see `iris_core.Iris`."""
        made = super().as_symmetric(external)
        self._end_allocation()
        return made

    def _make(self, name: str, like: torch.Tensor, out: torch.Tensor | None, *how: Any) -> torch.Tensor:
        made = super()._make(name, like, out, *how)
        if out is None:
            self._end_allocation()
        return made

    def _end_allocation(self) -> None:
        settings = getattr(self.backend, "settings", None)  # of a backend by others, anything
        if getattr(settings, "allocation_barrier", True) and not self.heap.streams.is_capturing():
            self.barrier()

    # -- older names --------------------------------------------------------------------------------------------------
    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor of one dimension on the heap, after a barrier; `heap.allocate` has none.

        Collective: every rank calls it alike.
        """
        made = self.heap.allocate(num_elements, dtype)
        self._end_allocation()
        return made

    def __on_symmetric_heap(self, tensor: torch.Tensor) -> bool:  # tests there ask for _Iris__on_symmetric_heap
        return self.is_symmetric(tensor)

    def __is_valid_device(self, device: Any) -> bool:
        import torch

        return device is None or same_device(torch.device(device), self.device)

    # -- copy engines -------------------------------------------------------------------------------------------------
    def get_copy_engine_ctx(self) -> None:
        """Return None: kernels have no copy engines."""
        return self.copy_engines_device_ctx

    def put(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: copies by engines from the host are not offered; the message says what is.

        Raises:
            UnsupportedError: (a RuntimeError) always.
        """
        _no_engines("put")

    def put_tile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse; see `put`."""
        _no_engines("put_tile")

    def put_tiles(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse; see `put`."""
        _no_engines("put_tiles")

    def quiet(self, to_rank: int | None = None, channel: int = 0) -> NoReturn:
        """Refuse; see `put`."""
        _no_engines("quiet")


def allocator_for(name: str, on_cpu: bool) -> str:
    """Return which of our allocators does the job of one of the reference system; other names are ours."""
    if name not in _ALLOCATORS or not on_cpu:
        return _ALLOCATORS.get(name, name)
    logger.warning("allocator_type=%r needs GPUs; ranks that compute on the CPU take the allocator 'host'", name)
    return "host"


def _check_engines(engines: str | Iterable[str] | None) -> None:
    wanted = [engines] if isinstance(engines, str) else list(engines or ())
    unknown = [each for each in wanted if each not in _ENGINES]
    if unknown:
        raise ArgumentError(f"engines={wanted}: nobody knows {unknown[0]!r}; there is {', '.join(_ENGINES)}")
    if wanted:
        raise UnsupportedError(
            f"engines={wanted}: kernels have no copy engines here; leave engines out. put and signal of kernels store "
            "by themselves, and ctx.ccl has algorithms of copy engines"
        )


def _no_engines(what: str) -> NoReturn:
    raise UnsupportedError(
        f"ctx.{what}: this context has no copy engine (it was opened without engines, and there are none); use put, "
        "signal and wait in a kernel, or ctx.ccl.send, recv and the algorithm copy_engine of ctx.ccl on the host"
    )


def is_simulation_env() -> bool:
    """Return whether contexts compute on the CPU: there is no GPU, or IRIS_DEVICE says so."""
    import torch

    from iris_core.settings import load_settings

    device = load_settings().device
    return not torch.cuda.is_available() if device is None else device.startswith("cpu")
