"""Calls in kernels: builtins of the language, device functions, aggregates, Python's own functions.

`Dialect` bundles what rewritten kernels need: the semantic layer, the operators, and this dispatch.  It mirrors how the
compiler treats a call, so what the compiler would refuse (an undecorated Python function) is refused here too.
"""

from __future__ import annotations

import builtins
import functools
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import triton
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_triton import _compat
from iris_triton.interpreter.entries import PREPARED, find_entry
from iris_triton.interpreter.frontend.builder import CpuBuilder
from iris_triton.interpreter.frontend.elementwise import as_float
from iris_triton.interpreter.frontend.operators import Operators, truth, unwrap
from iris_triton.interpreter.frontend.semantic import CpuSemantic
from iris_triton.interpreter.frontend.typefacts import block_type
from iris_triton.interpreter.frontend.values import numpy_dtype, signless, unsigned, wrap
from iris_triton.interpreter.hints import check_hint
from iris_triton.interpreter.rewrite import rewrite
from iris_triton.interpreter.state import program_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Tensor = tl.tensor
_MISSING = object()


class _Bound(functools.partial[Any]):
    """What runs a jitted method of the aggregate or tensor that it was taken from."""


class Dialect(Operators):
    """How one kernel language runs on the CPU."""

    def __init__(self, semantic: CpuSemantic) -> None:
        super().__init__(semantic)
        self._constants: dict[tuple[type, Any], Any] = {}
        self._handlers: dict[Any, Callable[..., Any]] = {}
        self._fill_handlers()
        self.helpers: dict[str, Callable[..., Any]] = {
            **self.table,
            "assign": self.assign,
            "attribute": self.attribute,
            "call": self.call,
            "check": self._check,
            "slice": lambda *parts: builtins.slice(*(unwrap(part) for part in parts)),
        }

    # -- device functions ---------------------------------------------------------------------------------------------
    def prepare(self, function: Any) -> Callable[..., Any]:
        """Return what runs a jitted function: its CPU entry, or its rewritten source."""
        prepared = function.__dict__.setdefault(PREPARED, {})
        known = prepared.get(self)  # device functions of Triton may be called in several languages
        if known is None or known[0] is not function.src:
            entry = find_entry(function)
            target = rewrite(function, self.helpers) if entry is None else functools.partial(self._call_entry, entry)
            known = prepared[self] = function.src, target
        ready: Callable[..., Any] = known[1]
        return ready

    def _call_entry(self, entry: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        named = {name: _to_numpy(value) for name, value in kwargs.items()}
        return _from_numpy(entry(program_info(), *map(_to_numpy, args), **named), self.block_type)

    def block_type(self, scalar: Any, shape: tuple[int, ...]) -> Any:
        """The type of a block that a CPU entry returns."""
        return block_type(scalar, shape)

    # -- launches -----------------------------------------------------------------------------------------------------
    def argument(self, value: Any, convert: Callable[[Any], Any]) -> Any:
        """What a kernel gets for an argument that only this language knows, else NotImplemented.

        `convert` converts the tensors and numbers in it.
        """
        if not isinstance(value, _compat.TensorDescriptor):
            return NotImplemented
        return self.semantic.make_tensor_descriptor(
            base=convert(value.base),
            shape=[convert(size) for size in value.shape],
            strides=[*map(convert, value.strides[:-1]), tl.constexpr(1)],
            block_shape=[tl.constexpr(size) for size in value.block_shape],
            padding_option=value.padding,
        )

    def constant(self, value: Any) -> Any:
        """What a kernel gets for a constexpr argument."""
        return value

    def run_program(self, body: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Run one program of a launch."""
        body(**arguments)

    def call_JitFunction(self, function: Any, args: Any, kwargs: dict[str, Any], caller_context: Any = None) -> Any:
        """What builtins that take a function call it with; the name is the compiler's."""
        return self.prepare(function)(*args, **kwargs)

    # -- calls --------------------------------------------------------------------------------------------------------
    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call anything that a kernel can call."""
        kind = function.__class__
        if kind is FunctionType or kind is type:
            handler = self._handlers.get(function)
            if handler is None:
                handler = self._handlers[function] = self._make_handler(function)
            return handler(*args, **kwargs)
        if kind is MethodType:
            method, owner = function.__func__, function.__self__
            if _compat.is_builtin(method) or isinstance(owner, tl.core.base_value):
                return self.call(method, owner, *args, **kwargs)
            return _call_python(function, *args, **kwargs)
        if kind is _Bound:
            return function(*args, **kwargs)
        if isinstance(function, _compat.JITFunction):
            return self.prepare(function)(*args, **kwargs)
        if isinstance(function, _compat.InterpretedFunction):
            return self.prepare(jitted(function))(*args, **kwargs)
        if isinstance(function, tl.constexpr):
            return self.call(function.value, *args, **kwargs)
        if isinstance(function, _compat.SemanticFunction):
            return function(*args, _semantic=self.semantic, _generator=self, **kwargs).value
        if any(function is question for question in _compat.TARGET_QUESTIONS):
            return False
        if isinstance(function, (BuiltinFunctionType, type)):
            handler = self._handlers.get(function)
            if handler is None and _compat.is_builtin(function):
                handler = self._handlers[function] = self._make_handler(function)
            if handler is not None:
                return handler(*args, **kwargs)
        return _call_python(function, *args, **kwargs)

    def _make_handler(self, function: Any) -> Callable[..., Any]:
        needed = _compat.compiler_arguments(function)
        if _compat.is_builtin(function) or "_semantic" in needed:  # some methods of builtin types are not marked
            given = {"_semantic": self.semantic, "_generator": self}
            return functools.partial(
                _call_builtin, _compat.builtin_body(function), **{name: given[name] for name in needed}
            )
        module = getattr(function, "__module__", "") or ""
        if module == _compat.PORTABLE_LIBDEVICE:
            vendor = _compat.vendor_function(function)
            if vendor is not None:
                return self._make_handler(vendor)
        if isinstance(function, FunctionType) and not module.startswith("triton."):
            raise UnsupportedError(
                f"kernels can only call jitted functions: decorate {function.__qualname__} with @triton.jit, or with "
                "@triton.constexpr_function if it computes constants"
            )
        return functools.partial(_call_python, function)

    def _fill_handlers(self) -> None:
        """Functions that the compiler treats specially."""
        handlers = self._handlers
        core = _compat.core
        handlers[builtins.range] = handlers[core.range] = self._range
        handlers[core.static_range] = _static_range
        handlers[core.static_assert] = _static_assert
        handlers[core.static_print] = lambda *args, **kwargs: print(*map(unwrap, args), **kwargs)
        handlers[core.map_elementwise] = self._map_elementwise
        handlers[_compat.target_info.current_target] = lambda: None
        for hint in (core.multiple_of, core.max_contiguous, core.max_constancy):
            handlers[hint] = functools.partial(check_hint, hint.__name__)
        for function, builtin in (
            (builtins.print, core.device_print),
            (builtins.min, _compat.python_minimum()),
            (builtins.max, _compat.python_maximum()),
        ):
            handlers[function] = functools.partial(self.call, builtin)
        for kind in (int, float, bool):
            handlers[kind] = functools.partial(_constant_of, kind)
        handlers[builtins.getattr] = self._getattr
        handlers[builtins.isinstance] = lambda value, kinds: isinstance(unwrap(value), kinds)
        for builtin in (core.program_id, core.load, core.store):
            quick = getattr(self, f"quick_{builtin.__name__}")
            handlers[builtin] = functools.partial(_first, quick, self._make_handler(builtin))
        # The same values every time, and tensors never change: one tensor per range.
        arange = functools.cache(functools.partial(_compat.builtin_body(core.arange), _semantic=self.semantic))
        handlers[core.arange] = lambda start, end: arange(unwrap(start), unwrap(end))

    # -- builtins -----------------------------------------------------------------------------------------------------
    def _range(self, first: Any, second: Any = None, step: Any = None, **hints: Any) -> Iterator[Any]:
        """`range` and `tl.range`: the loop variable is a tensor, as in a compiled kernel."""
        start, end = (0, first) if second is None else (first, second)
        bounds = [self.semantic.to_tensor(unwrap(x)) for x in (start, end, 1 if unwrap(step) is None else step)]
        for bound in bounds:
            if not bound.dtype.is_int() or bound.type.is_block():
                raise TypeError(f"the bounds and step of a loop must be integer scalars, got {bound.type}")
        promote = self.semantic.integer_promote_impl
        type_ = promote(promote(bounds[0].dtype, bounds[1].dtype), bounds[2].dtype)
        kept = numpy_dtype(type_)
        values = [int(_to_numpy(bound)) for bound in bounds]
        if values[2] == 0:
            raise ValueError("the step of a loop must not be 0")
        for value in builtins.range(*values):
            yield wrap(np.array([value]).astype(kept, copy=False), type_)

    def _map_elementwise(self, function: Any, *args: Any, pack: int = 1) -> Any:
        arguments = [self.semantic.to_tensor(arg) for arg in args]
        results = self.semantic.map_elementwise(arguments, self.prepare(function), int(unwrap(pack)))
        return results[0] if len(results) == 1 else results

    def _getattr(self, value: Any, name: Any, default: Any = _MISSING) -> Any:
        try:
            return self.attribute(value, unwrap(name))
        except AttributeError:
            if default is _MISSING:
                raise
            return default

    # -- attributes, assignments --------------------------------------------------------------------------------------
    def attribute(self, value: Any, name: str) -> Any:
        """`value.name`."""
        if isinstance(value, tl.constexpr) and name not in ("value", "type"):
            value = value.value
        if name == "value" and not hasattr(value, "value"):
            return value  # constexpr parameters are plain values here
        if name == "T" and isinstance(value, _Tensor):
            return self.semantic.permute(value, (1, 0))
        found = getattr(value, name)
        if isinstance(value, tl.core.base_value) and isinstance(
            found, (_compat.JITFunction, _compat.InterpretedFunction)
        ):
            return _Bound(self.prepare(jitted(found)), value)
        return found

    def assign(self, value: Any) -> Any:
        """What a variable holds after `name = value`: numbers become tensors."""
        kind = value.__class__
        if kind is _Tensor:
            return value
        if kind is tl.constexpr:
            value = value.value
            kind = value.__class__
        if kind is int or kind is float or kind is bool:
            key = (kind, value)
            tensor = self._constants.get(key)
            if tensor is None:
                tensor = self.semantic.to_tensor(value)
                if len(self._constants) < 1024 and (value or kind is not float):  # 0.0 and -0.0 are equal keys
                    self._constants[key] = tensor
            return tensor
        if kind is tuple:
            return tuple(self.assign(item) for item in value)
        return value

    def _check(self, condition: Any, message: Any = "") -> None:
        """The statement `assert`, which is tl.device_assert for tensors."""
        if isinstance(condition, _Tensor):
            self.call(tl.device_assert, condition, message)
        elif not truth(condition):
            raise AssertionError(unwrap(message))


def jitted(function: Any) -> Any:
    """The function itself, or the jitted one for what Triton interprets because of TRITON_INTERPRET."""
    if isinstance(function, _compat.JITFunction):
        return function
    found = function.__dict__.get("_iris_jitted")
    if found is None:
        found = function._iris_jitted = triton.JITFunction(function.fn)
    return found


def _first(fast: Callable[..., Any], general: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Try a fast path, and call the builtin itself where it declines."""
    result = fast(*args, **kwargs)
    return general(*args, **kwargs) if result is NotImplemented else result


def _call_python(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of constants."""
    return function(*map(unwrap, args), **{name: unwrap(value) for name, value in kwargs.items()})


_CONSTANTS = (int, str, float, bool)


def _call_builtin(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a builtin or make an aggregate; constants become constexprs, as the compiler passes them."""
    return body(
        *[tl.constexpr(value) if value.__class__ in _CONSTANTS else value for value in args],
        **{name: tl.constexpr(value) if value.__class__ in _CONSTANTS else value for name, value in kwargs.items()},
    )


def _constant_of(kind: type, value: Any) -> Any:
    """`int(value)` and the like, of constants; as a condition any object is true, so bool() would take a tensor."""
    value = unwrap(value)
    if isinstance(value, tl.core.base_value):
        raise TypeError(
            f"{kind.__name__}() in a kernel converts constants only, not {value.type}: use .to() or tl.cast"
        )
    return kind(value)


def _static_range(first: Any, second: Any = None, step: Any = None) -> Any:
    first, second, step = map(unwrap, (first, second, step))
    for value in (first, second, step):
        if value is not None and not isinstance(value, int):
            raise TypeError(f"tl.static_range needs constants, got {value!r} of type {type(value).__name__}")
    start, end = (0, first) if second is None else (first, second)
    return builtins.range(start, end, 1 if step is None else step)


def _static_assert(condition: Any, message: Any = "") -> None:
    condition = unwrap(condition)
    if not isinstance(condition, (bool, np.bool_)):
        raise TypeError(
            f"tl.static_assert needs a condition that depends on constants only, got {type(condition).__name__}"
        )
    if not condition:
        raise AssertionError(f"static_assert failed: {unwrap(message)}" if unwrap(message) else "static_assert failed")


# -- values of CPU entries --------------------------------------------------------------------------------------------
_TRITON = {
    np.dtype(np.bool_): tl.int1,
    **{np.dtype(f"{u}int{bits}"): getattr(tl, f"{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64)},
    **{np.dtype(f"float{bits}"): getattr(tl, f"float{bits}") for bits in (16, 32, 64)},
}


def _to_numpy(value: Any) -> Any:
    """Give a CPU entry what it computes with: see `iris_triton.interpreter.entries.cpu_entry`."""
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, tuple):
        return tuple(_to_numpy(item) for item in value)
    if not isinstance(value, tl.tensor):
        return value
    scalar = value.type.scalar
    data = as_float(value.handle) if scalar.is_floating() else value.handle.data
    if scalar.is_int() and scalar.is_int_unsigned():
        data = unsigned(data)
    return data if value.type.is_block() else data.reshape(-1)[0]


def _from_numpy(value: Any, block_type: Callable[[Any, tuple[int, ...]], Any]) -> Any:
    """Make a tensor of what a CPU entry returned; `block_type` makes the types of blocks."""
    if value is None or isinstance(value, tl.tensor):
        return value
    if isinstance(value, tuple):
        return tuple(_from_numpy(item, block_type) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = np.int32(value) if -(2**31) <= value < 2**31 else np.int64(value)
    elif isinstance(value, float):
        value = np.float32(value)
    data = np.asarray(value)
    scalar = _TRITON.get(data.dtype)
    if scalar is None:
        raise TypeError(f"a CPU entry returned {type(value).__name__} of {data.dtype}, which is no Triton type")
    if data.ndim == 0:
        return wrap(signless(data.reshape(1)), scalar)
    return wrap(signless(np.ascontiguousarray(data)), block_type(scalar, data.shape))


@functools.cache
def triton_dialect() -> Dialect:
    """The dialect of @triton.jit kernels."""
    return Dialect(CpuSemantic(CpuBuilder()))
