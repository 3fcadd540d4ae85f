"""How Gluon kernels run in the executor of iris_triton."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from iris_gluon import _compat
from iris_gluon.cpu.builder import GluonBuilder
from iris_gluon.cpu.semantic import CpuGluonSemantic
from iris_triton import _compat as _triton
from iris_triton.cpu.calls import Dialect
from iris_triton.cpu.operators import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable

_FORWARDED = (
    "static_assert", "static_print", "map_elementwise", "multiple_of", "max_contiguous", "max_constancy", "program_id",
    "load", "store",
)  # fmt: skip
"""Builtins of Triton's that the executor treats specially and that Gluon wraps in objects of its own."""


class GluonDialect(Dialect):
    """Gluon's semantic layer; device functions of Triton that are called from Gluon kernels are run by it, too."""

    def _fill_handlers(self) -> None:
        super()._fill_handlers()
        for name in _FORWARDED:
            own = _compat.forwarded(name)
            if own is not None:
                self._handlers[own] = self._handlers[getattr(_triton.core, name)]
        # Triton's arange has no layout: the semantic layer says so, which a cached one would not.
        self._handlers[_triton.core.arange] = self._make_handler(_triton.core.arange)
        self._handlers[_compat.core.arange] = self._arange_with_layout

    def _arange_with_layout(self, start: Any, end: Any, layout: Any = None) -> Any:
        layout = unwrap(layout)
        if layout is not None:
            self.semantic.check_layout(layout)  # the launches of a cached one may differ in their warps
        return self._cached_arange(unwrap(start), unwrap(end), layout)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - there is one dialect, which lives for ever
    def _cached_arange(self, start: int, end: int, layout: Any) -> Any:
        return _triton.builtin_body(_compat.core.arange)(start, end, layout, _semantic=self.semantic)

    def block_type(self, scalar: Any, shape: tuple[int, ...]) -> Any:
        return _compat.distributed_type(scalar, list(shape), _compat.layouts.AutoLayout())


@functools.cache
def gluon_dialect() -> Dialect:
    """The dialect of @gluon.jit kernels."""
    made: Callable[..., Any] = GluonBuilder
    return GluonDialect(CpuGluonSemantic(made()))
