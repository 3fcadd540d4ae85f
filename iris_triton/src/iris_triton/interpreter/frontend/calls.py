"""Calls in kernels: builtins of the language, device functions, aggregates, Python's own functions.

`Dialect` bundles what rewritten kernels need: the semantic layer, the operators, and this dispatch.  It mirrors how the
compiler treats a call, so what the compiler would refuse (an undecorated Python function) is refused here too.
"""

import builtins
import functools
import threading
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Self

import numpy as np
import triton
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_triton import _compat
from iris_triton.interpreter.entries import AROUND, ENTRY, PREPARED
from iris_triton.interpreter.frontend.builder import CpuBuilder
from iris_triton.interpreter.frontend.elementwise import as_float
from iris_triton.interpreter.frontend.operators import Operators, truth, unwrap
from iris_triton.interpreter.frontend.semantic import CpuSemantic
from iris_triton.interpreter.frontend.values import block_type, numpy_dtype, signless, unsigned, wrap
from iris_triton.interpreter.hints import check_hint
from iris_triton.interpreter.memory import accesses
from iris_triton.interpreter.rewrite import rewrite
from iris_triton.interpreter.state import program_info

_Tensor = tl.tensor
_JITTED = (_compat.JITFunction, _compat.InterpretedFunction)
_rewriting = threading.RLock()  # Python counts the depth of syntax trees of all threads together: SystemError


class Dialect(Operators):
    """How one kernel language runs on the CPU."""

    def __init__(
        self, semantic: CpuSemantic, around: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None
    ) -> None:
        super().__init__(semantic, around)
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

    @functools.cache  # noqa: B019 - one instance for each language, never freed
    def with_operators(self, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Self:
        """Return the same language with what `around` makes of its operators; the same object every time."""
        return type(self)(self.semantic, around)

    def prepare(self, function: Any) -> Callable[..., Any]:
        """Return what runs a jitted function: its CPU entry, or its rewritten source."""
        prepared = function.__dict__.setdefault(PREPARED, {})
        source, target = prepared.get(self, (None, None))  # device functions of Triton serve several languages
        if source is not function.src:
            entry = function.__dict__.get(ENTRY)
            if entry is None or isinstance(entry, _JITTED):
                with _rewriting:
                    target = rewrite(entry or function, self.helpers)
            else:
                target = functools.partial(self._call_entry, entry)
            around = function.__dict__.get(AROUND)
            if around is not None:
                target = functools.partial(around, target)
            prepared[self] = function.src, target
        return target

    def _call_entry(self, entry: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        named = {name: _to_numpy(value) for name, value in kwargs.items()}
        return _from_numpy(entry(program_info(), *map(_to_numpy, args), **named), self.block_type)

    def block_type(self, scalar: Any, shape: tuple[int, ...]) -> Any:
        return block_type(scalar, shape)

    def argument(self, value: Any, convert: Callable[[Any], Any]) -> Any:
        """Convert a launch argument that only this language knows; NotImplemented for others."""
        if not isinstance(value, _compat.TensorDescriptor):
            return NotImplemented
        return self.semantic.make_tensor_descriptor(
            base=convert(value.base),
            shape=[convert(size) for size in value.shape],
            strides=[*map(convert, value.strides[:-1]), tl.constexpr(1)],
            block_shape=[tl.constexpr(size) for size in value.block_shape],
            padding_option=value.padding,
        )

    def run_program(self, body: Callable[..., Any], arguments: dict[str, Any]) -> None:
        body(**arguments)

    def call_JitFunction(self, function: Any, args: Any, kwargs: dict[str, Any], caller_context: Any = None) -> Any:
        """Call a function for a builtin that takes one; the method's name is the compiler's."""
        return self.prepare(function)(*args, **kwargs)

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind = function.__class__
        if kind is _compat.JITFunction:
            return self.prepare(function)(*args, **kwargs)
        if kind is _compat.ConstexprFunction:
            return False if id(function) in _compat.TARGET_QUESTIONS else _call_python(function.fn, *args, **kwargs)
        if kind is FunctionType or kind is type:
            handler = self._handlers.get(function)
            if handler is None:
                handler = self._handlers[function] = self._make_handler(function)
            return handler(*args, **kwargs)
        if kind is MethodType:
            method, owner = function.__func__, function.__self__
            if owner.__class__ is _Tensor and (handler := self._handlers.get(method)) is not None:
                return handler(owner, *args, **kwargs)
            if _compat.is_builtin(method) or isinstance(owner, tl.core.base_value):
                return self.call(method, owner, *args, **kwargs)
            return _call_python(function, *args, **kwargs)
        if kind is functools.partial:  # a jitted method of an aggregate, see `attribute`
            return function(*args, **kwargs)
        if isinstance(function, _JITTED):
            return self.prepare(jitted(function))(*args, **kwargs)
        if isinstance(function, tl.constexpr):
            return self.call(function.value, *args, **kwargs)
        handler = self._handlers.get(function) if isinstance(function, (BuiltinFunctionType, type)) else None
        return _call_python(function, *args, **kwargs) if handler is None else handler(*args, **kwargs)

    def _make_handler(self, function: Any) -> Callable[..., Any]:
        needed = _compat.compiler_arguments(function)
        if _compat.is_builtin(function) or "_semantic" in needed:  # some methods of builtin types are not marked
            given = {"_semantic": self.semantic, "_generator": self}
            named = {name: given[name] for name in needed}
            return functools.partial(_call_builtin, _compat.builtin_body(function), **named)
        vendor = _compat.vendor_function(function)
        if vendor is not None:
            return self._make_handler(vendor)
        if isinstance(function, FunctionType) and not (function.__module__ or "").startswith("triton."):
            raise UnsupportedError(
                f"kernels can only call jitted functions: decorate {function.__qualname__} with @triton.jit, or with "
                "@triton.constexpr_function if it computes constants"
            )
        return functools.partial(_call_python, function)

    def _fill_handlers(self) -> None:
        handlers = self._handlers
        core = _compat.core
        handlers[builtins.range] = handlers[core.range] = self._range
        handlers[core.static_range] = _static_range
        handlers[core.static_assert] = _static_assert
        handlers[core.static_print] = functools.partial(_call_python, print)
        handlers[core.map_elementwise] = self._map_elementwise
        handlers[_compat.target_info.current_target] = lambda: None
        for hint in (core.multiple_of, core.max_contiguous, core.max_constancy):
            handlers[hint] = functools.partial(check_hint, hint.__name__)
        for builtin, meaning in _compat.PYTHON_BUILTINS.items():
            handlers[builtin] = functools.partial(self.call, meaning)
        for kind in (int, float, bool):
            handlers[kind] = functools.partial(_constant_of, kind)
        handlers[builtins.getattr] = self._getattr
        handlers[builtins.isinstance] = lambda value, kinds: isinstance(unwrap(value), kinds)
        for builtin in (core.cast, core.load, core.store, core.where, core.reduce):
            quick = getattr(self, f"quick_{builtin.__name__}")
            handlers[builtin] = functools.partial(_first, quick, self._make_handler(builtin))
        handlers[tl.tensor.to] = handlers[core.cast]

    def _range(self, first: Any, second: Any = None, step: Any = None, **hints: Any) -> Iterator[Any]:
        """`range` and `tl.range`: the loop variable is a tensor, as in a compiled kernel."""
        start, end = (0, first) if second is None else (first, second)
        bounds = [self.semantic.to_tensor(unwrap(x)) for x in (start, end, 1 if unwrap(step) is None else step)]
        for bound in bounds:
            if not bound.dtype.is_int() or bound.type.is_block():
                raise TypeError(f"the bounds and step of a loop must be integer scalars, got {bound.type}")
        type_ = functools.reduce(self.semantic.integer_promote_impl, (bound.dtype for bound in bounds))
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

    def _getattr(self, value: Any, name: Any, *default: Any) -> Any:
        try:
            return self.attribute(value, unwrap(name))
        except AttributeError:
            if default:
                return default[0]
            raise

    def attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, tl.constexpr) and name not in ("value", "type"):
            value = value.value
        if name == "value" and not hasattr(value, "value"):
            return value  # constexpr parameters are plain values here
        if name == "T" and isinstance(value, _Tensor):
            return self.semantic.permute(value, (1, 0))
        found = getattr(value, name)
        is_method = isinstance(value, tl.core.base_value) and isinstance(found, _JITTED)
        return functools.partial(self.prepare(jitted(found)), value) if is_method else found

    def assign(self, value: Any) -> Any:
        """Return the value of a variable after `name = value`: numbers become tensors."""
        kind = value.__class__
        if kind is _Tensor:
            return value
        if kind is tl.constexpr:
            value = value.value
            kind = value.__class__
        if kind is int or kind is float or kind is bool:
            tensor = self._constants.get((kind, value))
            if tensor is None:
                tensor = self.semantic.to_tensor(value)
                if len(self._constants) < 1024 and (value or kind is not float):  # 0.0 and -0.0 are equal keys
                    self._constants[kind, value] = tensor
            return tensor
        if kind is tuple:
            return tuple(self.assign(item) for item in value)
        return value

    def _check(self, condition: Any, message: Any = "") -> None:
        """Run the statement `assert`, which is tl.device_assert for tensors."""
        if isinstance(condition, _Tensor):
            self.call(tl.device_assert, condition, message)
        elif not truth(condition):
            raise AssertionError(unwrap(message))


def jitted(function: Any) -> Any:
    """Return the function itself, or the jitted one for what Triton interprets because of TRITON_INTERPRET."""
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


def _call_builtin(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a builtin or make an aggregate; constants become constexprs, as the compiler passes them."""
    constants = (int, str, float, bool)
    return body(
        *[tl.constexpr(value) if value.__class__ in constants else value for value in args],
        **{name: tl.constexpr(value) if value.__class__ in constants else value for name, value in kwargs.items()},
    )


def _constant_of(kind: type, value: Any) -> Any:
    """`int(value)` and the like, of constants; as a condition any object is true, so bool() would take a tensor."""
    value = unwrap(value)
    if isinstance(value, tl.core.base_value):
        raise TypeError(f"{kind.__name__}() in a kernel converts constants only, not {value.type}: use .to()")
    return kind(value)


def _static_range(first: Any, second: Any = None, step: Any = None) -> Any:
    first, second, step = map(unwrap, (first, second, step))
    start, end = (0, first) if second is None else (first, second)
    return builtins.range(start, end, 1 if step is None else step)


def _static_assert(condition: Any, message: Any = "") -> None:
    condition, message = unwrap(condition), unwrap(message)
    if not isinstance(condition, (bool, np.bool_)):
        raise TypeError(f"tl.static_assert needs a condition that depends on constants, got {type(condition).__name__}")
    if not condition:
        raise AssertionError(f"static_assert failed: {message}" if message else "static_assert failed")


_TRITON = {
    np.dtype(np.bool_): tl.int1,
    **{np.dtype(f"{u}int{bits}"): getattr(tl, f"{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64)},
    **{np.dtype(f"float{bits}"): getattr(tl, f"float{bits}") for bits in (16, 32, 64)},
}


def _to_numpy(value: Any) -> Any:
    """Convert an argument for a CPU entry; see `iris_triton.interpreter.entries.cpu_entry`."""
    value = unwrap(value)
    if isinstance(value, tuple):
        return tuple(map(_to_numpy, value))
    if not isinstance(value, tl.tensor):
        return value
    scalar = value.type.scalar
    data = as_float(value.handle) if scalar.is_floating() else accesses.plain(value.handle.data)
    if scalar.is_int() and scalar.is_int_unsigned():
        data = unsigned(data)
    return data if value.type.is_block() else data.reshape(-1)[0]


def _from_numpy(value: Any, block_type: Callable[[Any, tuple[int, ...]], Any]) -> Any:
    """Make a tensor of what a CPU entry returned; `block_type` makes the types of blocks."""
    if value is None or isinstance(value, tl.tensor):
        return value
    if isinstance(value, tuple):
        return tuple(_from_numpy(item, block_type) for item in value)
    data = np.asarray(value, np.float32 if isinstance(value, float) else None)
    if isinstance(value, int) and data.dtype == np.int64 and -(2**31) <= value < 2**31:
        data = data.astype(np.int32)
    scalar = _TRITON.get(data.dtype)
    if scalar is None:
        raise TypeError(f"a CPU entry returned {type(value).__name__} of {data.dtype}, which is no Triton type")
    if data.ndim == 0:
        return wrap(signless(data.reshape(1)), scalar)
    return wrap(signless(np.ascontiguousarray(data)), block_type(scalar, data.shape))


@functools.cache
def triton_dialect() -> Dialect:
    """Return the dialect of @triton.jit kernels."""
    return Dialect(CpuSemantic(CpuBuilder()))
