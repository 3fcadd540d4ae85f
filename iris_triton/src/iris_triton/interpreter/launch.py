"""Launches on the CPU: interception, conversion of arguments, execution of the grid.

`enable` replaces `JITFunction.run` (and the interpreted functions' and the autotuner's).  A launch runs here if its
tensors are on the CPU; every other launch, and every warmup, goes on to Triton.
"""

import functools
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_core.heap.streams import uncompiled
from iris_triton import _compat
from iris_triton.interpreter.config import configuration
from iris_triton.interpreter.entries import dialect_of
from iris_triton.interpreter.frontend.calls import jitted, triton_dialect
from iris_triton.interpreter.frontend.operators import unwrap
from iris_triton.interpreter.frontend.values import numpy_dtype, signless, wrap
from iris_triton.interpreter.memory import accesses, regions
from iris_triton.interpreter.scheduler import Program, Scheduler
from iris_triton.interpreter.state import Launch, current

_switch = threading.Lock()
_originals: dict[type, Callable[..., Any]] = {}


def enable() -> None:
    """Run launches with CPU tensors on the CPU, from now on and in the whole process.

    Calling it again changes nothing.  Launches from several Python threads are independent and run side by side.
    Warns if the installed Triton is not one of the tested versions.

    Raises:
        UnsupportedError: the installed Triton lacks what the executor needs; the message names the versions that fit.
    """
    with _switch:
        if _originals:
            return
        problem = _compat.version_problem()
        _compat.disable_stock_interpreter()
        try:
            triton_dialect()
        except (AttributeError, TypeError) as error:
            raise UnsupportedError(f"the CPU executor does not work with this Triton. {problem}") from error
        if problem:
            warnings.warn(f"{problem}; the CPU executor may fail or be wrong", RuntimeWarning, stacklevel=2)
        for owner, run in (
            (_compat.JITFunction, _run_kernel_on_cpu),
            (_compat.InterpretedFunction, _run_interpreted),
            (_compat.Autotuner, _run_tuned),
        ):
            _originals[owner] = owner.run
            owner.run = uncompiled(run)


def disable() -> None:
    """Undo `enable`; launches in progress finish."""
    with _switch:
        for owner, run in _originals.items():
            owner.run = run  # type: ignore[attr-defined]
        _originals.clear()


def is_enabled() -> bool:
    """Return whether launches with CPU tensors run on the CPU."""
    return bool(_originals)


def _run_kernel_on_cpu(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    if not warmup and _belongs_here(args, kwargs):
        return launch(self, grid, args, kwargs)
    run = _originals.get(_compat.JITFunction, _compat.JITFunction.run)  # another thread may have disabled it by now
    return run(self, *args, grid=grid, warmup=warmup, **kwargs)


def _run_interpreted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    """Launch a function that was decorated while TRITON_INTERPRET=1 was set."""
    function = jitted(self)
    function.pre_run_hooks = self.pre_run_hooks
    return _run_kernel_on_cpu(function, *args, grid=grid, warmup=warmup, **kwargs)


def _run_tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch the first configuration that pruning leaves: the autotuner without timing, which means nothing here."""
    if kwargs.get("warmup") or not _belongs_here(args, kwargs):
        return _originals[_compat.Autotuner](self, *args, **kwargs)
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    configs = self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs
    config = self.best_config = configs[0]
    chosen = config.all_kwargs()
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **chosen})
    self.nargs = None
    return self.fn.run(*args, **kwargs, **chosen)


def _belongs_here(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a launch has CPU tensors, or no tensors in a process without a GPU."""
    kinds = {_device_type(value) for value in itertools.chain(args, kwargs.values())} - {""}
    return "cpu" in kinds or not (kinds or _has_gpu())


def _device_type(value: Any) -> str:
    """Return the device type of a tensor, or of the first one in a tuple or descriptor; empty for other values."""
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, tuple):
        return next(filter(None, map(_device_type, value)), "")
    base = getattr(value, "base", None)  # reinterpreted tensors and tensor descriptors
    return "" if base is None else _device_type(base)


_has_gpu = functools.cache(torch.cuda.is_available)


def _bind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Bind arguments to parameters; return them and the compiler options among `kwargs`."""
    signature: inspect.Signature = function.signature
    # A kernel that wants to know num_warps has it as a parameter, too.
    options = {key: value for key, value in kwargs.items() if key in _option_names()}
    named = {key: value for key, value in kwargs.items() if key in signature.parameters or key not in options}
    try:
        bound = signature.bind(*args, **named)
    except TypeError as error:
        raise TypeError(f"kernel {function.__name__!r} {signature}: {error}") from None
    bound.apply_defaults()
    return bound.arguments, options


_option_names = functools.cache(_compat.launch_option_names)


@dataclass(frozen=True, slots=True)
class Launched:
    """Result of a launch on the CPU, in place of the compiled kernel."""

    name: str
    n_regs: int = 0  # there are no registers
    n_spills: int = 0


def launch(function: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launched:
    """Run a jitted kernel on the CPU; returns when all its programs have ended.

    `grid` is up to three numbers of programs, or a function that computes them from the arguments; `kwargs` may have
    compiler options, too.  Raises what a program raises, with a note that names kernel and program.
    """
    name, dialect, parameters = function.__name__, dialect_of(function), function.params
    if accesses.watcher is not None:
        dialect = accesses.watcher.dialect(dialect)
    bound, options = _bind(function, args, kwargs)
    for hook in function.pre_run_hooks:
        hook(*args, **kwargs)
    size = _grid_size(name, grid, bound)
    arguments = _Arguments(name, dialect)
    values = {each.name: arguments.convert(each, value) for each, value in zip(parameters, bound.values(), strict=True)}
    if 0 in size:
        return Launched(name)
    body = dialect.prepare(function)
    settings = configuration()
    checker = regions.BoundsChecker(regions.current_regions(), arguments.storages)
    state = Launch(
        name, size, checker, settings.bounds_check, settings.hints == "raise", options, views=arguments.views
    )
    watch = state.watch = None if accesses.watcher is None else accesses.watcher.launch(state, bound)

    def run(program: Program, part: Callable[[], None] = functools.partial(dialect.run_program, body, values)) -> None:
        outer = current.__dict__.copy()
        current.launch, current.program = state, program
        if watch is not None:
            watch.begin(program.pid)
        try:
            with np.errstate(all="ignore"):
                part()
        except Exception as error:
            error.add_note(f"in kernel {name!r}, program {program.pid} of grid {size}{_place(function, error)}")
            ones = [each.name for each in parameters if not each.is_constexpr and _is_one(values[each.name])]
            if ones and isinstance(error, AttributeError) and error.obj.__class__ is int:
                error.add_note(
                    f"the arguments {', '.join(map(repr, ones))} are 1, which makes them constants, as in compiled "
                    "kernels: use tl.cast for them, or list them in do_not_specialize of triton.jit"
                )
            raise
        finally:
            if watch is not None:
                watch.end(program.pid)
            current.__dict__.clear()
            current.__dict__.update(outer)

    try:
        Scheduler(state, run, settings.timeout_s).run()
    finally:
        if watch is not None:
            watch.close()
    return Launched(name)


def _place(function: Any, error: Exception) -> str:
    """Describe the running rank, if there is a heap, and the kernel's line that failed."""
    place = "".join(f", rank {rank} of {size}" for rank, size in regions.running_ranks())
    file = function.fn.__code__.co_filename
    lines = [n for frame, n in walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f"{place}, at {file}:{lines[-1]}" if lines else place


def _grid_size(kernel: str, grid: Any, bound: dict[str, Any]) -> tuple[int, int, int]:
    if callable(grid):
        grid = grid(bound)
    grid = grid if isinstance(grid, (tuple, list)) else (grid,)
    if not 1 <= len(grid) <= 3:
        raise ValueError(f"the grid of kernel {kernel!r} must have 1 to 3 dimensions, got {len(grid)}")
    try:
        x, y, z = (*map(index, map(unwrap, grid)), 1, 1)[:3]
    except TypeError:
        raise TypeError(f"the grid of kernel {kernel!r} must consist of integers, got {tuple(grid)}") from None
    if min(x, y, z) < 0:
        raise ValueError(f"the grid of kernel {kernel!r} has a negative dimension: {tuple(grid)}")
    return x, y, z


def _is_one(value: Any) -> bool:
    """Return whether Triton specialises on a number: integers that are 1 become constants of the kernel."""
    return isinstance(value, int) and value == 1 and not isinstance(value, bool)


_NUMBERS = (  # of arguments, the first that fits: its type, Python's, the least value, the end of the range
    (tl.int1, bool, 0, 2),
    (tl.int32, int, -(2**31), 2**31),
    (tl.int64, int, -(2**63), 2**63),
    (tl.uint64, int, 0, 2**64),
)


class _Arguments:
    """Converts the arguments of a launch for the kernel, and records the storages that it may access."""

    def __init__(self, kernel: str, dialect: Any) -> None:
        self._kernel, self._dialect = kernel, dialect
        self.storages: list[tuple[int, int, str]] = []
        self.views = None if accesses.watcher is None else accesses.watcher.views()

    def convert(self, parameter: Any, value: Any) -> Any:
        is_fixed = parameter.do_not_specialize or parameter.annotation_type  # stays a variable, also if it is 1
        if parameter.is_constexpr or (not is_fixed and _is_one(value)):
            return unwrap(value)
        return self._convert(parameter, value)

    def _convert(self, parameter: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._pointer(parameter, value, value)
        if value is None or isinstance(value, (tl.constexpr, tl.dtype, _compat.JITCallable)):
            return unwrap(value)
        if isinstance(value, (bool, int, float)):
            return self._number(parameter, value)
        if isinstance(value, tuple):
            items = [item if _is_one(item) else self._convert(parameter, item) for item in value]  # fixed or not
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        made = self._dialect.argument(value, functools.partial(self._convert, parameter))
        if made is not NotImplemented:
            return made
        if hasattr(value, "data_ptr"):
            return self._pointer(parameter, value, getattr(value, "base", value))
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return self._number(parameter, value.item())
        raise TypeError(
            f"argument {parameter.name!r} of kernel {self._kernel!r} is a {type(value).__name__}: pass a tensor, a "
            "number, None or a tuple of these, or annotate the parameter with tl.constexpr if it is a constant"
        )

    def _pointer(self, parameter: Any, value: Any, tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"argument {parameter.name!r} of kernel {self._kernel!r} is on {tensor.device}, but other "
                    "arguments are on the CPU: a launch needs all its tensors on one device"
                )
            storage = tensor.untyped_storage()
            self.storages.append((storage.data_ptr(), storage.nbytes(), parameter.name))
        address = value.data_ptr()
        if self.views is not None and isinstance(tensor, torch.Tensor):
            address = self.views.tagged(tensor, address, parameter.name)
        return wrap(np.array([address], np.uint64), _compat.pointer_type(value.dtype, parameter.is_const))

    def _number(self, parameter: Any, value: bool | int | float) -> Any:
        name, type_ = parameter.name, _compat.scalar_type(parameter.annotation_type)
        if type_ is None:
            fitting = (type_ for type_, kind, low, high in _NUMBERS if isinstance(value, kind) and low <= value < high)
            type_ = tl.float32 if isinstance(value, float) else next(fitting, None)
            if type_ is None:
                raise ValueError(f"argument {name!r} of kernel {self._kernel!r} does not fit 64 bits: {value}")
        if type_.is_floating():
            return self._dialect.semantic.cast(wrap(np.array([value], np.float64), tl.float64), type_)
        if isinstance(value, float):
            raise TypeError(f"argument {name!r} of kernel {self._kernel!r} must be an integer, got {value}")
        wide = np.array([value], np.uint64 if value >= 2**63 else np.int64)
        return wrap(signless(wide).astype(numpy_dtype(type_)), type_)
