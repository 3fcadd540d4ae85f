"""Host functions under the names of the reference system, for scripts that say `import iris_triton as iris`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from iris_core.api import Iris


def iris(
    heap_size: int | str = 1 << 30, allocator_type: str = "auto", engines: str | Iterable[str] | None = ()
) -> Iris:
    """Open a context with the Triton backend.

    Collective: every rank calls it, with the same arguments.

    Args:
        heap_size: size of each rank's heap in bytes, or text such as "1GiB".
        allocator_type: name of an allocator plugin ("host", "torch", ...); "auto" takes the best that is usable.
        engines: copy engines; there are none yet, so anything but None or nothing is refused.

    Returns:
        The context; `close()` it, or use it in a `with` statement.

    Raises:
        UnsupportedError: a copy engine was asked for.
        PluginNotFoundError: there is no such allocator; the message lists those that are installed.
        IrisError: everything that `iris_core.Iris` raises.

    Example:
        >>> import iris_triton as iris
        >>> ctx = iris.iris(1 << 20)  # doctest: +SKIP
    """
    from iris_core.api import Iris
    from iris_core.errors import UnsupportedError

    wanted = [engines] if isinstance(engines, str) else list(engines or ())
    if wanted:
        raise UnsupportedError(f"engines={wanted}: there are no copy engines in this version; leave engines out")
    return Iris(heap_size, allocator=allocator_type, backend="triton")


def get_device_id_for_rank(rank: int) -> int:
    """Return the index of the GPU that a rank uses when the ranks of a host share its GPUs in turn; 0 without a GPU.

    Args:
        rank: the rank within its host.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return rank % count if count else 0
