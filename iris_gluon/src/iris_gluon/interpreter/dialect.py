"""How Gluon kernels run in the executor of iris_triton."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from iris_gluon import _compat
from iris_gluon.interpreter import program
from iris_gluon.interpreter.builder import GluonBuilder
from iris_gluon.interpreter.cta import Cta
from iris_gluon.interpreter.hopper.memory_ops import scalar
from iris_gluon.interpreter.hopper.tma import Descriptor
from iris_gluon.interpreter.hopper.wgmma import check_operands
from iris_gluon.interpreter.registers import check_group_copy, check_mfma, check_mma_v2
from iris_gluon.interpreter.semantic import CpuGluonSemantic
from iris_triton import _compat as _triton
from iris_triton.interpreter.frontend.calls import Dialect
from iris_triton.interpreter.frontend.operators import unwrap
from iris_triton.interpreter.frontend.typefacts import undecided_layouts
from iris_triton.interpreter.state import current

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
        undecided_layouts.add(_compat.layouts.AutoLayout)
        checks = [
            (_compat.hopper.warpgroup_mma, lambda a, b, acc: check_operands(a, b, acc, program.num_warps())),
            (_compat.hopper.mma_v2, check_mma_v2),
            *((mfma, check_mfma) for mfma in _compat.mfmas),
            (_compat.group_copy, lambda memory, pointer, mask: check_group_copy(pointer)),
        ]
        for builtin, check in checks:
            self._handlers[builtin] = functools.partial(_checked, check, self._make_handler(builtin))

    def _arange_with_layout(self, start: Any, end: Any, layout: Any = None) -> Any:
        layout = unwrap(layout)
        if layout is not None:
            self.semantic.check_layout(layout)  # the launches of a cached one may differ in their warps
        return self._cached_arange(unwrap(start), unwrap(end), layout)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - there is one dialect, which lives for ever
    def _cached_arange(self, start: int, end: int, layout: Any) -> Any:
        return _triton.builtin_body(_compat.core.arange)(start, end, layout, _semantic=self.semantic)

    def argument(self, value: Any, convert: Callable[[Any], Any]) -> Any:
        """Tensor descriptors made on the host."""
        if isinstance(value, _triton.TensorDescriptor):
            raise TypeError(
                "a Gluon kernel takes triton.experimental.gluon.nvidia.hopper.TensorDescriptor, which has a layout, "
                "not triton.tools.tensor_descriptor.TensorDescriptor"
            )
        if not isinstance(value, _compat.HostDescriptor):
            return NotImplemented
        base = convert(value.base)
        element = base.type.element_ty
        block = tuple(int(n) for n in value.block_shape)
        handle = Descriptor(
            scalar(base.handle),
            element,
            [int(n) for n in value.shape],
            [int(n) for n in value.strides],
            block,
            value.layout._to_ir(self.semantic.builder),
            value.padding == "nan",
        )
        handle.check_rules("a tensor descriptor among the arguments")
        shape = [self.semantic.cast(convert(int(n)), _compat.core.int32) for n in value.shape]
        strides = [self.semantic.cast(convert(int(n)), _compat.core.int64) for n in value.strides]
        type_ = _compat.core.block_type(element, list(block))
        return _compat.hopper.tma.tensor_descriptor(handle, shape, strides, type_, value.layout)

    def constant(self, value: Any) -> Any:
        # Functions are told from those that the kernel names, as gl.warp_specialize takes only these.
        return _compat.constexpr(value) if isinstance(value, _triton.JITCallable) else value

    def run_program(self, body: Callable[..., Any], arguments: dict[str, Any]) -> None:
        outer = current.program
        cta = Cta(outer, program.launched_warps(), current.launch)
        current.program = cta.root
        try:
            body(**arguments)
            cta.finish()
        finally:
            current.program = outer

    def block_type(self, scalar: Any, shape: tuple[int, ...]) -> Any:
        return _compat.distributed_type(scalar, list(shape), _compat.layouts.AutoLayout())


def _checked(
    check: Callable[[Any, Any, Any], None], run: Callable[..., Any], first: Any, second: Any, third: Any = None,
    *rest: Any, **named: Any
) -> Any:  # fmt: skip
    """Call a builtin after a check of its first three operands."""
    check(first, second, named.get("acc", third))
    if third is None:
        return run(first, second, *rest, **named)
    return run(first, second, third, *rest, **named)


@functools.cache
def gluon_dialect() -> Dialect:
    """The dialect of @gluon.jit kernels."""
    made: Callable[..., Any] = GluonBuilder
    return GluonDialect(CpuGluonSemantic(made()))
