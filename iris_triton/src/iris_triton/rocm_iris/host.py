"""Host functions under the names of the reference system."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from iris_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from iris_triton.rocm_iris.ported_context import Iris


def iris(
    heap_size: int | str | None = None, allocator_type: str = "auto", engines: str | Iterable[str] | None = ()
) -> Iris:
    """Open a context with the Triton backend; see `iris_triton.Iris`.

    Collective: every rank calls it, with the same arguments.

    Args:
        heap_size: size of each rank's heap in bytes, or text such as "1GiB"; IRIS_HEAP_SIZE or 1 GiB by default.
        allocator_type: name of an allocator plugin ("host", "torch", ...); "auto" takes the best that is usable.
        engines: copy engines; there are none, so anything but None or nothing is refused.

    Returns:
        The context; `close()` it, or use it in a `with` statement.

    Raises:
        ArgumentError: (a ValueError) nobody knows the engine.
        UnsupportedError: (a RuntimeError) a copy engine was asked for.
        PluginNotFoundError: there is no such allocator; the message lists those that are installed.
        IrisError: everything that `iris_core.Iris` raises.

    Example:
        >>> import iris_triton as iris
        >>> ctx = iris.iris(1 << 20)  # doctest: +SKIP
    """
    from iris_triton.rocm_iris.ported_context import Iris

    return Iris(heap_size, allocator_type, engines)


def get_device_id_for_rank(rank: int) -> int:
    """Return the index of the GPU that a rank uses when the ranks of a host share its GPUs in turn; 0 without a GPU.

    Args:
        rank: the rank within its host.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return rank % count if count else 0


def iris_launch(
    kernel_fn: Any, grid: Any, *args: Any, algorithm: str, rank: int, dtype: Any = None, **kwargs: Any
) -> Any:
    """Launch a kernel: `kernel_fn[grid](*args, **kwargs)`, and return what that returns.

    With IRIS_KERNEL_ARTIFACTS_DIR the artefacts of every kernel are kept, however it is launched, under the kernel's
    name and the rank; so `algorithm`, `rank` and `dtype`, which name their folder there, are not needed.
    """
    return kernel_fn[grid](*args, **kwargs)


class RocshmemProvider:
    """A heap of rocSHMEM's, which is not offered: making one raises.

    Raises:
        UnsupportedError: always; `ctx.allocate_symmetric` returns the same pair of tensor and peers' addresses.
    """

    def __new__(cls, device: Any = None) -> NoReturn:
        """Refuse."""
        raise UnsupportedError(
            "RocshmemProvider: there is no rocSHMEM here; iris_triton.iris(...).allocate_symmetric(...) returns the "
            "same: a tensor and its address on every rank"
        )
