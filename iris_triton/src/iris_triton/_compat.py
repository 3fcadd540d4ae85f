"""Supported Triton versions, and their private interfaces: the only module that uses these.

Everything here is private to Triton and may move in any release; the table says for which releases it was tried.

    interface                         3.6        3.7        3.8        3.9
    aggregate                         core._aggregate       triton.aggregate
    bases of aggregates               any classes           aggregates only
    cache hints of loads and stores   cache modifier, eviction         one policy
    comparisons with Python numbers   typed like tensors               typed like scalars
    block pointers                    builder operations    in Python  removed
    bool arguments of launches        refused by the stock interpreter accepted

Importing it undoes TRITON_INTERPRET=1: kernels stay `JITFunction`s, and the CPU executor runs those.
"""

import contextlib
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any, dataclass_transform

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from iris_core.errors import UnsupportedError

TESTED = ((3, 6), (3, 7), (3, 8), (3, 9))  # (major, minor) of the Triton releases that the test suite was run with
KNOWN = ", ".join(f"{major}.{minor}" for major, minor in TESTED)


def version() -> tuple[int, int]:
    """(major, minor) of the installed Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def version_problem() -> str:
    """Describe a problem with the installed Triton's version; empty if it is in the table."""
    text = f"Triton {triton.__version__} is not one of the versions that Iris was tested with ({KNOWN})"
    return "" if version() in TESTED else text


try:
    from triton._C.libtriton import interpreter as _interpreter
    from triton._C.libtriton import ir as ir
    from triton._utils import canonicalize_ptr_dtype
    from triton.language import core as core
    from triton.language import target_info as target_info
    from triton.language.extra import libdevice  # kernels find it as tl.extra.libdevice, too, without importing it
    from triton.language.semantic import TritonSemantic as TritonSemantic
    from triton.runtime import _allocation, driver
    from triton.runtime.autotuner import Autotuner as Autotuner
    from triton.runtime.interpreter import InterpretedFunction as InterpretedFunction
    from triton.runtime.interpreter import InterpreterBuilder as InterpreterBuilder
    from triton.runtime.interpreter import InterpreterOptions as InterpreterOptions
    from triton.runtime.jit import ConstexprFunction as ConstexprFunction
    from triton.runtime.jit import JITCallable as JITCallable
    from triton.runtime.jit import JITFunction as JITFunction
    from triton.runtime.jit import MockTensor as MockTensor
    from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor
except ImportError as error:
    raise UnsupportedError(
        f"Triton {triton.__version__} lacks something that Iris needs ({error}); it works with Triton {KNOWN}"
    ) from error

native: Any = _interpreter  # loads, stores and atomics on raw addresses


@dataclass_transform(eq_default=False)
def aggregate(cls: type) -> Any:
    """`triton.aggregate`, which is public from 3.8 on; a class may leave its constructor out, as there."""
    if hasattr(triton, "aggregate"):
        return triton.aggregate(cls)
    if "__init__" not in vars(cls):
        fields = tuple(cls.__annotations__)

        def construct(self: Any, *args: Any, **named: Any) -> None:
            if len(args) > len(fields):
                raise TypeError(f"{cls.__name__} has {len(fields)} fields, not {len(args)}")
            for name, value in (dict(zip(fields, args, strict=False)) | named).items():
                setattr(self, name, value if isinstance(value, core.base_value) else tl.constexpr(value))

        construct.__triton_builtin__ = True  # type: ignore[attr-defined]
        cls.__init__ = construct  # type: ignore[misc]
    return core._aggregate(cls)


class AggregateMethods:
    """Base of classes without fields whose jitted methods several aggregates inherit."""

    __triton_aggregate__ = True  # from 3.8 on, aggregates refuse bases that are none; before, they take any


# -- jitted functions -------------------------------------------------------------------------------------------------
def definition_line(function: Any) -> int:
    """Line of a jitted function's `def` in its file."""
    definitions = (index for index, line in enumerate(function.raw_src) if line.lstrip().startswith("def "))
    return int(function.starting_line_number + next(definitions, 0))


def language_of(function: Any) -> str:
    """Name of the language that a jitted function is written in: "triton" or "gluon"."""
    return "gluon" if function.is_gluon() else "triton"


def gluon_warps(semantic: Any, generator: Any) -> int | None:
    """Warps that run the code that Gluon compiles, also in a partition of gl.warp_specialize; None in Triton."""
    count = getattr(semantic, "num_warps", None)
    return None if count is None else int(core._unwrap_if_constexpr(count(generator)))


def launch_option_names() -> frozenset[str]:
    """Names of the compiler options that a launch may carry, over all GPU backends of this installation."""
    from triton.backends import backends

    names = {"debug", "extern_libs", "instrumentation_mode", "maxnreg", "num_warps", "num_ctas", "num_stages"}
    for backend in backends.values():
        home = backend.compiler.__module__
        for value in vars(sys.modules[home]).values():
            if isinstance(value, type) and value.__module__ == home and value.__name__.endswith("Options"):
                names.update(getattr(value, "__dataclass_fields__", ()))
    return frozenset(names)


@functools.cache
def pointer_type(dtype: Any, is_const: bool) -> Any:
    """Triton's pointer type for elements of a dtype of torch or Triton."""
    return tl.str_to_ty(canonicalize_ptr_dtype(dtype, is_const), None)


def scalar_type(name: str) -> Any:
    """Triton's type for the annotation of a scalar parameter ("i64", "fp32"), or None for another annotation."""
    return None if not name or name.startswith("*") else tl.str_to_ty(name, None)


def disable_stock_interpreter() -> None:
    """Undo TRITON_INTERPRET=1, also for Triton's own device functions, which it has made interpreted ones."""
    if not triton.knobs.runtime.interpret:
        return
    triton.knobs.runtime.interpret = False
    replaced: dict[int, Any] = {}
    for package in (tl, tl.standard, tl.random, core, tl.math, core.tensor):
        for name, value in list(vars(package).items()):
            if isinstance(value, InterpretedFunction):
                setattr(package, name, replaced.setdefault(id(value), triton.jit(value.fn)))


disable_stock_interpreter()

runtime_knobs: Any = triton.knobs.runtime  # where a profiler sets launch_enter_hook and launch_exit_hook


@contextlib.contextmanager
def scratch_from(allocate: Callable[[int, int, int | None], Any]) -> Iterator[None]:
    """Allocate scratch memory of launches within the block by a function of bytes, alignment and raw stream."""
    token = _allocation._allocator.set(allocate)
    try:
        yield
    finally:
        _allocation._allocator.reset(token)


def c_module(source: str, name: str) -> Any:
    """Compile an extension for CUDA as Triton compiles its own, with the same compiler and into its cache; load it.

    Raises:
        OSError, RuntimeError, subprocess.CalledProcessError, ImportError: there is no working compiler.
    """
    from triton.backends import nvidia
    from triton.runtime.build import compile_module_from_src

    return compile_module_from_src(source, name, include_dirs=[f"{nvidia.__path__[0]}/include"])


def linked_libraries(builder: Any) -> tuple[str, ...]:
    """Names of the libraries with which the kernel is linked that a builder makes, or that the CPU executor runs."""
    launched = getattr(builder, "launched_libraries", None)  # of the executor's builders
    return tuple(dict((builder.options.extern_libs if launched is None else launched()) or ()))


# -- builtins of the language -----------------------------------------------------------------------------------------
def is_builtin(function: Any) -> bool:
    """Return whether the compiler calls `function` with its own arguments `_semantic` and `_generator`."""
    return bool(getattr(function, "__triton_builtin__", False))


class _Source(JITCallable):  # type: ignore[misc]
    """The source of a module, for the keys of Triton's cache."""

    cache_key, used_global_vals = "", MappingProxyType[Any, Any]({})

    def __init__(self, module: str) -> None:
        self.cache_key = hashlib.sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()


def builtin(function: Callable[..., Any]) -> Any:
    """`core.builtin`, with the module's source in the cache's key of kernels that call it, which Triton leaves out."""
    made: Any = core.builtin(function)
    made.__triton_aggregate__, made.hash_attrs = True, [_Source(function.__module__)]  # it looks for these first
    return made


def builtin_body(function: Any) -> Any:
    """Return the function that a builtin wraps; the wrapper only checks that it is called from a kernel."""
    return getattr(function, "__wrapped__", function) if isinstance(function, FunctionType) else function


def compiler_arguments(function: Any) -> frozenset[str]:
    """Return which of `_semantic` and `_generator` a builtin takes."""
    signature = getattr(function, "signature", None) or inspect.signature(function)
    return frozenset(signature.parameters) & {"_semantic", "_generator"}


def vendor_function(function: Any) -> Any:
    """Map a portable name of tl.extra.libdevice to its CUDA function, as the compiler does; None for others."""
    is_name = getattr(function, "__module__", "") == libdevice.__name__
    return getattr(tl.extra.cuda.libdevice, function.__name__, None) if is_name else None


TARGET_QUESTIONS = frozenset(id(each) for each in vars(target_info).values() if isinstance(each, ConstexprFunction))
"""Ids of is_cuda() and the like, whose hashes are slow: false on the CPU, also in a process that has a GPU."""

_MINIMUM, _MAXIMUM = getattr(core, "builtin_min", tl.minimum), getattr(core, "builtin_max", tl.maximum)
PYTHON_BUILTINS = {min: _MINIMUM, max: _MAXIMUM, print: core.device_print}  # what Python's builtins mean in a kernel


def combine_function(region_builder: Callable[..., Any]) -> Any:
    """Return the jitted combine function of a reduction or scan; None if the region builder does not expose it."""
    cells = dict(zip(region_builder.__code__.co_freevars, region_builder.__closure__ or (), strict=False))
    return cells["combine_fn"].cell_contents if "combine_fn" in cells else None


def is_uncached(policy: tuple[Any, ...]) -> bool:
    """Return whether the cache hints of a load bypass caches (".cv")."""
    return bool(policy) and policy[0] in (ir.CACHE_MODIFIER.CV, "cv", ".cv")


NATIVE_OPS = {op: getattr(native.RMW_OP, op.name) for op in InterpreterBuilder.ir_rmw_op_to_interpreter_rmw_op}
NATIVE_SEMS = dict(InterpreterBuilder.ir_sem_to_interpreter_sem)


# -- compiling without a device (compile_only) ------------------------------------------------------------------------
@contextlib.contextmanager
def active_target(target: GPUTarget) -> Iterator[None]:
    """Make `target` Triton's current device within the block: for compiling, not for launches."""
    name = f"{target.backend}:{target.arch}"  # in place of a number: kernels are cached by device
    stand_in = SimpleNamespace(
        get_current_device=lambda: name,
        get_current_stream=lambda device=None: 0,
        get_current_target=lambda: target,
        map_python_to_cpp_type=lambda ty: ty,
    )
    previous = driver._active
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver._active = previous  # reset_active() would probe for a real GPU and raise where there is none
