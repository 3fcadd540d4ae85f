"""Low-overhead repeated launches of one kernel, in which only a few tensors change.

Triton's own launch binds, specialises and looks up at every call, which costs tens of microseconds.  Here that happens
once; later calls pass addresses to launcher.c, which calls the driver.  Where that is not to be had (no CUDA, no C
compiler, a kernel that needs more), they pass them to the launcher that Triton has compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from iris_core.dispatch.team import lasting
from iris_core.logs import logger
from iris_triton import _compat

_AT_ONCE = 8  # kernels that a process compiles beside each other: about as many as a first call measures


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AT_ONCE, "iris-compile")


def early_launch(device: str) -> dict[str, Any]:
    """Return the compiler options to start a kernel while the previous one on the stream still runs.

    Only for kernels that begin with `iris_triton.language.asm.follow(True)`: {"launch_pdl": True} on NVIDIA GPUs from
    Hopper on, else nothing.
    """
    has_it = device != "cpu" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"launch_pdl": True} if has_it else {}


class BoundKernel:
    """A kernel with all arguments but some tensors.

    Those tensors may have other addresses at each call, so the kernel must name their parameters in
    `do_not_specialize_on_alignment`; dtypes stay the same.  A kernel that describes memory to the copy unit does so in
    scratch memory that all its launches share: they must follow each other, and graphs may keep its address.

    Args:
        kernel, grid: a jitted function, and the number of its programs.
        arguments: by name, everything but `tensors`; tensors among them are kept alive.
        tensors: names of the parameters that each call provides.
        device, options: torch's name of the device; num_warps and other compiler options.

    Example:
        bound = BoundKernel(copy, 8, {"numel": 1024, "BLOCK": 128}, ("out", "inp"), "cuda:0", {"num_warps": 4})
        bound(None, y, x)
    """

    def __init__(
        self, kernel: Any, grid: int, arguments: Mapping[str, Any], tensors: Sequence[str], device: str,
        options: Mapping[str, Any] | None = None
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._names = kernel, grid, tuple(tensors)
        self._arguments, self._options = dict(arguments), dict(options or {})
        self._on_cpu = device == "cpu"
        self._index = 0 if self._on_cpu else torch.device(device).index
        self.again: Any = None  # launches once more: it looks at addresses only; never on the CPU
        self._scratch: torch.Tensor | None = None
        self._compiling: Future[None] | None = None

    def compile_ahead(self, **dtypes: torch.dtype) -> None:
        """Begin to compile on another thread, for tensors of these dtypes by name; the first launch waits for it.

        Triton compiles without Python's lock for most of the time, so kernels that are bound one after the other
        compile beside each other.  One that does not compile says so when it is launched.  Nothing on the CPU.
        """
        if not self._on_cpu:
            self._compiling = _compilers().submit(self._compile, dtypes)

    def _compile(self, dtypes: Mapping[str, torch.dtype]) -> None:
        named = {name: _compat.MockTensor(dtypes[name]) for name in self._names}
        with torch.cuda.device(self._index):  # of this thread
            self._kernel.warmup(grid=(self._grid,), **self._arguments, **named, **self._options)

    def __call__(self, stream: Any, *tensors: torch.Tensor) -> None:
        """Launch on a torch stream, None for the current one, with one tensor for each name."""
        if self.again is None:
            self._first(stream, tensors)
        else:
            self.again(stream, *tensors)

    def _first(self, stream: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        """Launch through Triton, and keep the compiled kernel."""
        if self._compiling is not None:
            wait([self._compiling])
        named = dict(zip(self._names, tensors, strict=True))
        on_stream = contextlib.nullcontext() if self._on_cpu or stream is None else torch.cuda.stream(stream)
        with on_stream, _compat.scratch_from(self._allocate):
            compiled = self._kernel[(self._grid,)](**self._arguments, **named, **self._options)
        if self._on_cpu:
            return
        order = [parameter.name for parameter in self._kernel.params]
        everything = {**self._arguments, **named}
        # addresses: the launcher asks the driver about each object that is not a number
        plain = {name: v.data_ptr() if isinstance(v, torch.Tensor) else v for name, v in everything.items()}
        values, places = [plain[name] for name in order], tuple(order.index(name) for name in self._names)
        how = compiled, self._grid, values, places, self._index
        through_triton, scratch = _through_triton(*how), 0
        if self._scratch is not None:
            through_triton, scratch = _compat.scratch_from(self._allocate)(through_triton), self._scratch.data_ptr()
        self.again = _c_launch(*how, through_triton, scratch) or through_triton

    def _allocate(self, nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < nbytes:
            # torch aligns to 512 bytes; descriptions need 128
            device = f"cuda:{self._index}"
            self._scratch = lasting(lambda: torch.empty(nbytes, dtype=torch.int8, device=device))
        return self._scratch


class BoundKernels:
    """Launches of one kernel that differ in more than addresses: a `BoundKernel` for each.

    Args:
        kernel, arguments, tensors, device, options: as for `BoundKernel`; no parameter needs a mark, as a launch is for
            tensors of the same alignment only.

    Example:
        copies = BoundKernels(copy, {"BLOCK": 128}, ("out", "inp"), "cuda:0")
        copies(8, y, x, numel=1024)
    """

    _MOST = 1024  # kept: servers come back to many numbers of tokens

    def __init__(
        self, kernel: Any, arguments: Mapping[str, Any], tensors: Sequence[str], device: str,
        options: Mapping[str, Any] | None = None
    ) -> None:  # fmt: skip
        self._kernel, self._arguments, self._rest = kernel, arguments, (tuple(tensors), device, options)
        self._made: dict[tuple[Any, ...], BoundKernel] = {}

    def __call__(self, grid: int, *tensors: torch.Tensor, **numbers: Any) -> None:
        """Launch on the current stream; `numbers` are further arguments, the same names in the same order always."""
        key = grid, *numbers.values(), *((each.dtype, each.data_ptr() % 16 == 0) for each in tensors)
        bound = self._made.get(key)
        if bound is None:
            if len(self._made) >= self._MOST:
                self._made.pop(next(iter(self._made)), None)
            bound = self._made[key] = BoundKernel(self._kernel, grid, {**self._arguments, **numbers}, *self._rest)
        bound(None, *tensors)


def _through_triton(
    compiled: Any, grid: int, values: Sequence[Any], places: tuple[int, ...], index: int
) -> Callable[..., None]:
    """Return what launches a compiled kernel by the launcher that Triton has compiled: (stream, tensor, ...).

    The values must be what the kernel was compiled for: nothing is checked or specialised again.
    """
    run, function, metadata, hooks = compiled.run, compiled.function, compiled.packed_metadata, _compat.runtime_knobs

    def launch(stream: Any, *tensors: torch.Tensor) -> None:
        mine = list(values)  # other threads may be launching
        for place, tensor in zip(places, tensors, strict=True):
            mine[place] = tensor.data_ptr()
        raw = torch._C._cuda_getCurrentRawStream(index) if stream is None else stream.cuda_stream
        enter, leave, described = hooks.launch_enter_hook, hooks.launch_exit_hook, None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler listens; a chain may be empty
            described = compiled.launch_metadata((grid, 1, 1), raw, *mine)
        else:
            enter = leave = None
        run(grid, 1, 1, raw, function, metadata, described, enter, leave, *mine)

    return launch


class _Driver(NamedTuple):
    """Functions that launcher.c calls, by address, and what is asked when a launch is made."""

    functions: tuple[int, int, int]  # cuLaunchKernelEx, cuCtxSetCurrent, cuGetErrorString
    context: Callable[[int], int]  # the primary context of a device
    parameter: Callable[[int, int], tuple[int, int] | None]  # offset and size of a parameter; None after the last
    current_stream: Callable[[int], int]


@functools.cache
def _driver() -> _Driver:
    library = ctypes.CDLL("libcuda.so.1")

    @functools.cache
    def context(index: int) -> int:
        device, found = ctypes.c_int(), ctypes.c_void_p()
        if library.cuDeviceGet(ctypes.byref(device), index) or library.cuDevicePrimaryCtxRetain(
            ctypes.byref(found), device
        ):
            raise RuntimeError(f"cuda:{index} has no primary context")
        return found.value or 0

    def parameter(function: int, number: int) -> tuple[int, int] | None:
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        asked = ctypes.c_void_p(function), ctypes.c_size_t(number), ctypes.byref(offset), ctypes.byref(size)
        return None if library.cuFuncGetParamInfo(*asked) else (offset.value, size.value)

    names = "cuLaunchKernelEx", "cuCtxSetCurrent", "cuGetErrorString"
    one, two, three = (ctypes.cast(library[name], ctypes.c_void_p).value or 0 for name in names)
    library.cuFuncGetParamInfo  # noqa: B018  # AttributeError before CUDA 12.4
    return _Driver((one, two, three), context, parameter, torch._C._cuda_getCurrentRawStream)


@functools.cache
def _c_type(file: str, name: str) -> Any:
    """Return a type that a file in C defines; None, with a warning in the log, where it cannot be compiled."""
    try:
        return getattr(_compat.c_module(Path(__file__).with_name(f"{file}.c").read_text(), f"iris_{file}"), name)
    except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError) as error:
        logger.warning("calls take some microseconds more: %s.c cannot be compiled (%s)", file, error)
        return None


def call_cache(low: int, high: int, skips_float32: bool) -> Any:
    """Return a new `iris_core.protocols.CallCache`; None without a compiler, and before torch 2.11."""
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is None or (make := _c_type("call_cache", "CallCache")) is None:
        return None
    try:
        return make(table, torch.Tensor, torch.is_grad_enabled, low, high, 16, skips_float32)
    except ValueError as error:  # of a DLPack to come
        logger.info("calls are looked for in Python: %s", error)
        return None


_PACKED = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp16": "e", "fp32": "f", "fp64": "d"}
_PACKED |= {"u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "f32": "f"}


def _driver_parameters(compiled: Any, values: Sequence[Any], scratch: int) -> list[tuple[int, bytes]] | None:
    """Return which parameters of a compiled kernel the driver takes, by number, and their bytes; None if Triton must.

    Constants are none.  Triton appends two addresses, -1 here, of scratch memory, and of a profiler's, which is null.
    Not of clusters, of cooperative kernels, nor of those with tensor descriptors.  `compiled` is what a launch
    returned, `values` are those of all parameters, in their order, addresses as ints; `scratch` is 0 if there is none.
    """
    needs = compiled.metadata
    if type(compiled.run).__name__ != "CudaLauncher" or needs.num_ctas != 1 or needs.launch_cooperative_grid:
        return None
    if (needs.global_scratch_size and not scratch) or needs.profile_scratch_size:
        return None
    found: list[tuple[int, bytes]] = []
    for number, (kind, value) in enumerate(zip(compiled.src.signature.values(), values, strict=True)):
        for each, part in _flat(kind, value):
            packed = "Q" if each.startswith("*") else _PACKED.get(each)
            if packed is None:
                return None
            found.append((number, struct.pack(f"<{packed}", part)))
    return [*found, (-1, struct.pack("<Q", scratch)), (-1, bytes(8))]


def _flat(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Types and values of a parameter: a tuple's are its items', and constants are none."""
    if isinstance(kind, tuple):
        for pair in zip(kind, value, strict=True):
            yield from _flat(*pair)
    elif kind != "constexpr":
        yield kind, value


def _c_launch(
    compiled: Any, grid: int, values: Sequence[Any], places: tuple[int, ...], index: int,
    through_triton: Callable[..., None], scratch: int = 0, driver: Callable[[], _Driver] = _driver
) -> Callable[..., None] | None:  # fmt: skip
    """Return what launches a compiled kernel from C: (stream, tensor, ...); None where that cannot be.

    The driver must find the parameters where the list has them, so another layout of a later Triton is noticed.

    Args:
        compiled, grid: what a launch returned, and the number of its programs.
        values, places: of all parameters, in their order, addresses as ints; places of the tensors among them.
        index: of the device.
        through_triton: the same by Triton, for as long as a profiler listens.
        scratch: address of memory for what the kernel describes; 0 if it has none.
    """
    parameters = _driver_parameters(compiled, values, scratch)
    if parameters is None or (make := _c_type("launcher", "Launch")) is None:
        return None
    try:
        found = driver()
    except (OSError, AttributeError) as error:
        logger.info("launches go through Triton: %s", error)
        return None
    end = 0
    for number, (_, packed) in enumerate(parameters):
        begin = -(-end // len(packed)) * len(packed)
        end = begin + len(packed)
        if found.parameter(compiled.function, number) != (begin, len(packed)):
            return None
    if found.parameter(compiled.function, len(parameters)) is not None:
        return None
    numbers = [number for number, _ in parameters]
    launch: Callable[..., None] = make(
        driver=found.functions,
        context=found.context(index),
        function=compiled.function,
        programs=grid,
        threads=32 * compiled.metadata.num_warps,
        shared_nbytes=compiled.metadata.shared,
        early=compiled.metadata.launch_pdl,
        values=b"".join(packed.ljust(8, b"\0") for _, packed in parameters),
        places=tuple(numbers.index(place) for place in places),
        current_stream=found.current_stream,
        device=index,
        knobs=_compat.runtime_knobs,
        through_triton=through_triton,
    )
    return launch
