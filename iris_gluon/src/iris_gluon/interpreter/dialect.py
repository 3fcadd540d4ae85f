"""How Gluon kernels run in the executor of iris_triton."""

import functools
from collections.abc import Callable
from typing import Any

from iris_gluon import _compat
from iris_gluon.interpreter import program
from iris_gluon.interpreter.builder import GluonBuilder
from iris_gluon.interpreter.cta import Cta
from iris_gluon.interpreter.hopper.operations import numbers, scalar
from iris_gluon.interpreter.hopper.shared import BlockType
from iris_gluon.interpreter.hopper.tma import Descriptor
from iris_gluon.interpreter.hopper.wgmma import check_operands
from iris_gluon.interpreter.semantic import CpuGluonSemantic
from iris_triton import _compat as _triton
from iris_triton.interpreter.frontend.calls import Dialect
from iris_triton.interpreter.state import current

_FORWARDED = (  # builtins of Triton's that the executor treats specially and that Gluon wraps in objects of its own
    "static_assert", "static_print", "map_elementwise", "multiple_of", "max_contiguous", "max_constancy", "cast",
    "load", "store",
)  # fmt: skip


class GluonDialect(Dialect):
    """Gluon's semantic layer; device functions of Triton that are called from Gluon kernels are run by it, too."""

    def _fill_handlers(self) -> None:
        super()._fill_handlers()
        for name in _FORWARDED:
            own = _compat.forwarded(name)
            if own is not None:
                self._handlers[own] = self._handlers[getattr(_triton.core, name)]
        product = _compat.hopper.warpgroup_mma
        self._handlers[product] = functools.partial(_checked_product, self._make_handler(product))

    def argument(self, value: Any, convert: Callable[[Any], Any]) -> Any:
        if isinstance(value, _triton.TensorDescriptor):
            raise TypeError(
                "a Gluon kernel takes triton.experimental.gluon.nvidia.hopper.TensorDescriptor, which has a layout, "
                "not triton.tools.tensor_descriptor.TensorDescriptor"
            )
        if not isinstance(value, _compat.HostDescriptor):
            return NotImplemented
        base = convert(value.base)
        element = base.type.element_ty
        box = BlockType(element, numbers(value.block_shape), value.layout._to_ir(self.semantic.builder))
        sizes, steps = [*numbers(value.shape)], [*numbers(value.strides)]
        handle = Descriptor(scalar(base.handle), sizes, steps, box, value.padding == "nan")
        handle.check_rules("a tensor descriptor among the arguments")
        shape = [self.semantic.cast(convert(n), _compat.core.int32) for n in sizes]
        strides = [self.semantic.cast(convert(n), _compat.core.int64) for n in steps]
        type_ = _compat.core.block_type(element, list(box.shape))
        return _compat.hopper.tma.tensor_descriptor(handle, shape, strides, type_, value.layout)

    def run_program(self, body: Callable[..., Any], arguments: dict[str, Any]) -> None:
        outer = current.program
        cta = Cta(outer, program.launched_warps())
        current.program = cta.root
        try:
            body(**arguments)
            cta.finish()
        finally:
            current.program = outer

    def block_type(self, scalar: Any, shape: tuple[int, ...]) -> Any:
        return _compat.distributed_type(scalar, list(shape), _compat.layouts.AutoLayout())


def _checked_product(run: Callable[..., Any], a: Any, b: Any, acc: Any, **named: Any) -> Any:
    """warpgroup_mma, after a look at its operands."""
    check_operands(a, b, acc)
    return run(a, b, acc, **named)


@functools.cache
def gluon_dialect() -> Dialect:
    """Return the dialect of @gluon.jit kernels."""
    made: Callable[..., Any] = GluonBuilder
    return GluonDialect(CpuGluonSemantic(made()))
