"""What Gluon's IR builder has beyond Triton's, computing with numpy.

Layouts are properties of types, and have no meaning for arrays: converting one leaves the array as it is.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from iris_gluon.cpu import program
from iris_gluon.cpu.inference import result_layout
from iris_triton.cpu.builder import CpuBuilder
from iris_triton.cpu.typefacts import block_type
from iris_triton.cpu.values import Handle


class LaidOut(Handle):
    """A handle that knows its layout, where the result's has to be inferred from it."""

    __slots__ = ("layout",)

    def __init__(self, data: Any, dtype: Any, layout: Any) -> None:
        super().__init__(data, dtype)
        self.layout = layout


class GluonBuilder(CpuBuilder):
    """Computes what Gluon's semantic layer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self._common_options = dict(vars(self.options))
        del self.options

    def __getattr__(self, name: str) -> Any:
        if name == "options":
            return self._options()
        if name.startswith("get_") and name.endswith("_layout"):
            return _no_attribute
        return super().__getattr__(name)

    def _options(self) -> SimpleNamespace:
        """Options of the launch, as far as the language shows them to kernels."""
        return SimpleNamespace(
            **self._common_options,
            num_warps=program.num_warps(),
            num_ctas=program.num_ctas(),
            warp_size=program.warp_size(),
        )

    # -- types --------------------------------------------------------------------------------------------------------
    def get_distributed_ty(self, element: Any, shape: Any, layout: None) -> Any:
        return block_type(element, tuple(shape))

    # -- layouts ------------------------------------------------------------------------------------------------------
    def get_gluon_layout_from_tensor(self, handle: Handle) -> Any:
        assert isinstance(handle, LaidOut)
        return handle.layout

    def create_convert_layout(self, type_: Any, value: Handle) -> Handle:
        return Handle(value.data, value.dtype)

    def create_set_auto_layout(self, layout: None, value: Handle) -> Handle:
        return Handle(value.data, value.dtype)

    def is_convert_layout_trivial(self, type_: Any, value: Handle) -> bool:
        raise NotImplementedError  # the semantic layer compares linear layouts instead

    # -- shapes -------------------------------------------------------------------------------------------------------
    def create_broadcast(self, value: Handle, type_: Any) -> Handle:
        return super().create_broadcast(value, type_.shape)

    def create_expand_dims(self, value: Handle, axis: int) -> Handle:
        return self._infer("expand_dims", value, super().create_expand_dims(value, axis), axis)

    def create_reshape(self, value: Handle, shape: Any, allow_reorder: bool) -> Handle:
        return self._infer("reshape", value, super().create_reshape(value, shape, allow_reorder), *shape)

    def create_trans(self, value: Handle, order: Any) -> Handle:
        return self._infer("trans", value, super().create_trans(value, order), *order)

    def create_join(self, left: Handle, right: Handle) -> Handle:
        return self._infer("join", left, super().create_join(left, right))

    def create_split(self, value: Handle) -> tuple[Handle, Handle]:
        left, right = super().create_split(value)
        return self._infer("split", value, left), self._infer("split", value, right)

    def _infer(self, operation: str, value: Handle, result: Handle, *arguments: Any) -> Handle:
        if not isinstance(value, LaidOut):
            return result
        shape = tuple(value.data.shape)
        layout = result_layout(
            operation,
            value.layout,
            shape,
            *(int(argument) for argument in arguments),
            num_warps=program.num_warps(),
            warp_size=program.warp_size(),
        )
        return LaidOut(result.data, result.dtype, layout)

    def create_cat(self, left: Handle, right: Handle, type_: Any = None) -> Handle:
        return super().create_cat(left, right)

    def create_histogram(self, data: Handle, bins: int, mask: Handle | None, layout: None = None) -> Handle:
        return super().create_histogram(data, bins, mask)


def _no_attribute(*arguments: Any, **named: Any) -> None:
    """Layouts have no form in IR here."""
