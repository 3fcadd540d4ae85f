"""The host function of the reference system's `iris.experimental.iris_gluon`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from iris_triton.rocm_iris.ported_context import Iris


def iris(
    heap_size: int | str | None = None, allocator_type: str = "auto", engines: str | Iterable[str] | None = ()
) -> Iris:
    """Open a context with the Gluon backend; otherwise as `iris_triton.iris`.

    Collective: every rank calls it, with the same arguments.

    Args:
        heap_size, allocator_type, engines: see there.

    Returns:
        The context; `close()` it, or use it in a `with` statement.

    Raises:
        IrisError: everything that `iris_triton.iris` raises.

    Example:
        >>> import iris_gluon
        >>> ctx = iris_gluon.iris(1 << 20)  # doctest: +SKIP
    """
    from iris_triton.rocm_iris.ported_context import Iris

    return Iris(heap_size, allocator_type, engines, backend="gluon")
