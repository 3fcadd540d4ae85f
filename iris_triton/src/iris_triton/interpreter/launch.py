"""Launches: which ones run on the CPU, what their arguments become, and running the grid.

`enable` replaces `JITFunction.run` (and the interpreted functions' and the autotuner's).  A launch runs here if its
tensors are on the CPU; every other launch, and every warmup, goes on to Triton.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import warnings
from dataclasses import dataclass
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_triton import _compat
from iris_triton.interpreter.config import configuration
from iris_triton.interpreter.dialects import dialect_of
from iris_triton.interpreter.errors import DeadlockError
from iris_triton.interpreter.frontend.calls import Dialect, jitted, triton_dialect
from iris_triton.interpreter.frontend.values import numpy_dtype, signless, wrap
from iris_triton.interpreter.memory import regions
from iris_triton.interpreter.memory.regions import BoundsChecker
from iris_triton.interpreter.scheduler import Program, Scheduler
from iris_triton.interpreter.state import Launch, current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
            (_compat.JITFunction, _run_jitted),
            (_compat.InterpretedFunction, _run_interpreted),
            (_compat.Autotuner, _run_tuned),
        ):
            _originals[owner] = owner.run
            owner.run = run


def disable() -> None:
    """Undo `enable`; launches in progress finish."""
    with _switch:
        for owner, run in _originals.items():
            owner.run = run  # type: ignore[attr-defined]
        _originals.clear()


def is_enabled() -> bool:
    """Whether launches with CPU tensors run on the CPU."""
    return bool(_originals)


# -- diverted functions -----------------------------------------------------------------------------------------------
def _run_jitted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    if not warmup and _belongs_here(args, kwargs):
        return launch(self, grid, args, kwargs)
    original = _originals.get(_compat.JITFunction)
    if original is None:  # disabled by another thread in between
        return self.run(*args, grid=grid, warmup=warmup, **kwargs)
    return original(self, *args, grid=grid, warmup=warmup, **kwargs)


def _run_interpreted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    """A function decorated while TRITON_INTERPRET=1 was in force."""
    function = jitted(self)
    function.pre_run_hooks = self.pre_run_hooks
    return _run_jitted(function, *args, grid=grid, warmup=warmup, **kwargs)


def _run_tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The autotuner on the CPU: the first configuration that pruning leaves, as times here mean nothing."""
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
    """Whether a launch has CPU tensors, or no tensors in a process without a GPU."""
    other = False
    for value in itertools.chain(args, kwargs.values()):
        kind = _device_type(value)
        if kind == "cpu":
            return True
        other = other or kind != ""
    return not other and not _has_gpu()


def _device_type(value: Any) -> str:
    """Device type of a tensor, or of the first tensor in a tuple or descriptor; empty for anything else."""
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, tuple):
        return next((kind for item in value if (kind := _device_type(item))), "")
    base = getattr(value, "base", None)  # reinterpreted tensors and tensor descriptors
    return _device_type(base) if base is not None else ""


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


# -- launching --------------------------------------------------------------------------------------------------------
class _Plan:
    """What is known of a kernel before its launch; kept on the jitted function."""

    def __init__(self, function: Any) -> None:
        self.names = [parameter.name for parameter in function.params]
        self.parameters = {parameter.name: parameter for parameter in function.params}
        self.constexprs = {p.name for p in function.params if p.is_constexpr}
        self.defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(function.fn).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        self.types = {p.name: _compat.scalar_type(p.annotation_type) for p in function.params if not p.is_constexpr}
        self.const = {p.name for p in function.params if p.is_const}
        self.fixed = {p.name for p in function.params if p.do_not_specialize or p.annotation_type}
        """Names of those that stay variables, also if they are 1."""

    def bind(self, kernel: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Assign arguments to parameters; returns them and the compiler options among `kwargs`.

        Raises:
            TypeError: an argument is missing, given twice, or unknown.
        """
        if len(args) > len(self.names):
            raise TypeError(f"kernel {kernel!r} takes {len(self.names)} arguments but {len(args)} were given")
        bound = dict(zip(self.names, args, strict=False))
        options = {}
        for name, value in kwargs.items():
            if name in self.parameters:
                if name in bound:
                    raise TypeError(f"kernel {kernel!r} got two values for argument {name!r}")
                bound[name] = value
                if name in _option_names():  # a kernel that wants to know num_warps has it as a parameter, too
                    options[name] = value
            elif name in _option_names():
                options[name] = value
            else:
                raise TypeError(
                    f"kernel {kernel!r} has no argument {name!r}, and no compiler has such an option; its arguments "
                    f"are {', '.join(self.names)}"
                )
        if len(bound) < len(self.names):
            missing = [name for name in self.names if name not in bound and name not in self.defaults]
            if missing:
                raise TypeError(f"kernel {kernel!r} lacks the argument{'s' * (len(missing) > 1)} {', '.join(missing)}")
            bound = {name: bound[name] if name in bound else self.defaults[name] for name in self.names}
        return bound, options


_option_names = functools.cache(_compat.launch_option_names)


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launch on the CPU returns, where one on a GPU returns the compiled kernel.

    Attributes:
        name: name of the kernel.
        n_regs, n_spills: 0: there are no registers.
    """

    name: str
    n_regs: int = 0
    n_spills: int = 0


def launch(function: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launched:
    """Run a jitted kernel on the CPU; returns when all its programs have ended.

    Args:
        function: the jitted kernel.
        grid: up to three numbers of programs, or a function that computes them from the arguments.
        args: positional arguments of the launch.
        kwargs: keyword arguments and compiler options.

    Raises:
        TypeError: the arguments do not fit the kernel.
        ValueError: the grid or the tensors' devices do not fit.
        OutOfBoundsError: a program touched memory that is not its own.
        DeadlockError: all programs waited for memory that did not change.
        Exception: whatever a program raised, with a note that names kernel and program.
    """
    kernel = function.__name__
    dialect = dialect_of(function)
    plan = function.__dict__.get("_iris_plan")
    if plan is None:
        plan = function._iris_plan = _Plan(function)
    bound, options = plan.bind(kernel, args, kwargs)
    for hook in function.pre_run_hooks:
        hook(*args, **kwargs)
    size = _grid_size(kernel, grid, bound)
    storages: list[tuple[int, int, str]] = []
    values = {
        name: value.value
        if isinstance(value, tl.constexpr)
        else dialect.constant(value)
        if name in plan.constexprs
        else value
        if name not in plan.fixed and _is_one(value)
        else _Argument(kernel, name, plan.types[name], name in plan.const, storages, dialect).convert(value)
        for name, value in bound.items()
    }
    count = size[0] * size[1] * size[2]
    launched = Launched(kernel)
    if count == 0:
        return launched
    body = dialect.prepare(function)
    settings = configuration()
    checker = BoundsChecker(regions.current_regions(), storages)
    state = Launch(kernel, size, checker, settings.bounds_check, settings.hints == "raise", options)

    def run(program: Program) -> None:
        outer = current.__dict__.copy()
        current.launch, current.program = state, program
        try:
            with np.errstate(all="ignore"):
                dialect.run_program(body, values)
        except Exception as error:
            error.add_note(f"in kernel {kernel!r}, program {program.pid} of grid {size}{_place(function, error)}")
            ones = [name for name, value in values.items() if name not in plan.constexprs and _is_one(value)]
            if ones and isinstance(error, AttributeError) and error.obj.__class__ is int:
                error.add_note(
                    f"the arguments {', '.join(map(repr, ones))} are 1, which makes them constants, as in compiled "
                    "kernels: use tl.cast for them, or list them in do_not_specialize of triton.jit"
                )
            raise
        finally:
            current.__dict__.clear()
            current.__dict__.update(outer)

    scheduler = Scheduler(
        _program_ids(size),
        count,
        run,
        timeout_s=settings.timeout_s,
        deadlock=functools.partial(_deadlock, kernel, checker),
        while_idle=_stands_still,
    )
    scheduler.run()
    return launched


def _place(function: Any, error: Exception) -> str:
    """The running rank, where there is a heap, and the kernel's line that has failed."""
    place = "".join(f", rank {rank} of {size}" for rank, size in regions.running_ranks())
    lines = [
        n for frame, n in walk_tb(error.__traceback__) if frame.f_code.co_filename == function.fn.__code__.co_filename
    ]
    return f"{place}, at {function.fn.__code__.co_filename}:{lines[-1]}" if lines else place


def _program_ids(size: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    for z in range(size[2]):
        for y in range(size[1]):
            for x in range(size[0]):
                yield x, y, z


def _grid_size(kernel: str, grid: Any, bound: dict[str, Any]) -> tuple[int, int, int]:
    if callable(grid):
        grid = grid(bound)
    if not isinstance(grid, (tuple, list)):
        grid = (grid,)
    if not 1 <= len(grid) <= 3:
        raise ValueError(f"the grid of kernel {kernel!r} must have 1 to 3 dimensions, got {len(grid)}")
    try:
        sizes = [tl.constexpr(n).value.__index__() if not isinstance(n, tl.constexpr) else n.value for n in grid]
    except AttributeError:
        raise TypeError(f"the grid of kernel {kernel!r} must consist of integers, got {tuple(grid)}") from None
    if any(n < 0 for n in sizes):
        raise ValueError(f"the grid of kernel {kernel!r} has a negative dimension: {tuple(sizes)}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _is_one(value: Any) -> bool:
    """Whether a number becomes a constant of a compiled kernel: Triton compiles anew for integers that are 1."""
    return isinstance(value, int) and value == 1 and not isinstance(value, bool)


class _Argument:
    """Converts one argument of a launch to what the kernel sees, and notes the storages that it may access."""

    def __init__(
        self, kernel: str, name: str, type_: Any, const: bool, storages: list[tuple[int, int, str]], dialect: Dialect
    ) -> None:
        self._kernel, self._name, self._type, self._const = kernel, name, type_, const
        self._storages, self._dialect = storages, dialect

    def convert(self, value: Any) -> Any:
        """Make the tensor or constant for a value."""
        if isinstance(value, torch.Tensor):
            return self._pointer(value, value, _torch_pointer_type(value.dtype))
        if value is None or isinstance(value, (tl.constexpr, tl.dtype, _compat.JITCallable)):
            return value.value if isinstance(value, tl.constexpr) else value
        if isinstance(value, (bool, int, float)):
            return self._number(value)
        if isinstance(value, tuple):
            items = [item if _is_one(item) else self.convert(item) for item in value]  # do_not_specialize or not
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        made = self._dialect.argument(value, self.convert)
        if made is not NotImplemented:
            return made
        if isinstance(value, _compat.TensorDescriptor):
            return self._descriptor(value)
        if hasattr(value, "data_ptr"):
            return self._pointer(value, getattr(value, "base", value), _compat.pointer_type_of(value))
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return self._number(value.item())
        raise TypeError(
            f"argument {self._name!r} of kernel {self._kernel!r} is a {type(value).__name__}: pass a tensor, a number, "
            "None or a tuple of these, or annotate the parameter with tl.constexpr if it is a constant"
        )

    def _pointer(self, value: Any, tensor: Any, type_: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"argument {self._name!r} of kernel {self._kernel!r} is on {tensor.device}, but other arguments "
                    "are on the CPU: a launch needs all its tensors on one device"
                )
            storage = tensor.untyped_storage()
            self._storages.append((storage.data_ptr(), storage.nbytes(), self._name))
        if self._const:
            type_ = tl.pointer_type(type_.element_ty, const=True)
        return wrap(np.array([value.data_ptr()], np.uint64), type_)

    def _number(self, value: bool | int | float) -> Any:
        type_ = self._type
        if type_ is None:
            if isinstance(value, float):
                type_ = tl.float32
            elif isinstance(value, bool):
                type_ = tl.int1
            else:
                fitting = ((tl.int32, -(2**31), 2**31), (tl.int64, -(2**63), 2**63), (tl.uint64, 0, 2**64))
                type_ = next((t for t, low, high in fitting if low <= value < high), None)
                if type_ is None:
                    raise ValueError(
                        f"argument {self._name!r} of kernel {self._kernel!r} does not fit 64 bits: {value}"
                    )
        if type_.is_floating():
            return self._dialect.semantic.cast(wrap(np.array([value], np.float64), tl.float64), type_)
        if isinstance(value, float):
            raise TypeError(f"argument {self._name!r} of kernel {self._kernel!r} must be an integer, got {value}")
        kept = numpy_dtype(type_)
        if kept == np.bool_:
            return wrap(np.array([bool(value)]), type_)
        wide = np.array([value], np.uint64 if value >= 2**63 else np.int64)
        return wrap(signless(wide).astype(kept), type_)

    def _descriptor(self, value: Any) -> Any:
        strides = [self.convert(stride) for stride in value.strides]
        strides[-1] = tl.constexpr(1)
        return self._dialect.semantic.make_tensor_descriptor(
            base=self.convert(value.base),
            shape=[self.convert(size) for size in value.shape],
            strides=strides,
            block_shape=[tl.constexpr(size) for size in value.block_shape],
            padding_option=value.padding,
        )


@functools.cache
def _torch_pointer_type(dtype: torch.dtype) -> Any:
    return _compat.pointer_type_of(torch.empty(0, dtype=dtype))


def _stands_still(quiet: bool, place: Any) -> bool:
    """Whether no rank and no other thread can end what all programs of a launch wait for, as far as can be known."""
    still = quiet
    for heap in regions.registered_heaps():
        heap.check_peers(_first_address(place))
        still = heap.stands_still(quiet) and still
    return still


def _first_address(place: Any) -> int:
    return int(np.frombuffer(place, np.uint64)[0]) if isinstance(place, bytes) else int(place)


def _deadlock(
    kernel: str,
    checker: BoundsChecker,
    program: Program,
    place: Any,
    value: bytes,
    waiting: int,
    unstarted: int,
    how: str,
) -> DeadlockError:
    several = isinstance(place, bytes)
    address = _first_address(place)
    size = len(value) // (len(place) // 8) if several else len(value)
    last = int.from_bytes(value[:size], "little")
    running = regions.running_ranks()
    ranks = ", ".join(f"{rank} of {count}" for rank, count in running)
    where = f"{len(place) // 8} words, the first at " if several else "the word at "
    message = (
        f"kernel {kernel!r}, program {program.pid}{f' on rank {ranks}' if ranks else ''}: all programs of the launch "
        f"have been waiting {how}. This one polls {where}{checker.describe(address)}; the last value "
        f"seen was {last:#x} ({int.from_bytes(value[:size], 'little', signed=True)} as a signed integer). "
        f"{waiting} other programs wait, {unstarted} have not started. Look for who should have written there, or "
        "raise timeout_s of the CPU executor."
    )
    rank = running[0][0] if running else None
    return DeadlockError(message, kernel=kernel, rank=rank, program=program.pid, address=address, last_value=last)
