"""Low-overhead repeated launches of one kernel, in which only a few tensors change.

Triton's own launch binds, specialises and looks up at every call, which costs tens of microseconds.  Here that happens
once; later calls pass addresses to the launcher that Triton has compiled.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from iris_triton import _compat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
    `do_not_specialize_on_alignment`; dtypes stay the same.

    Args:
        kernel: a jitted function.
        grid: number of programs.
        arguments: by name, everything but `tensors`; tensors among them are kept alive.
        tensors: names of the parameters that each call provides.
        device: torch's name of the device.
        options: num_warps and other compiler options.

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
        self._run: Any = None
        self._raw_stream: Any = None if self._on_cpu else torch._C._cuda_getCurrentRawStream
        self._values: list[Any] = []  # of the first call; a call changes a copy, for other threads may be launching
        self._places: tuple[int, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Return whether a call needs addresses only; never on the CPU."""
        return self._run is not None

    def __call__(self, stream: Any, *tensors: torch.Tensor) -> None:
        """Launch.

        Args:
            stream: a torch stream; None for the current one.  Ignored on the CPU.
            *tensors: one per name.
        """
        if self._run is None:
            self._first(stream, tensors)
            return
        values = self._values.copy()
        if len(tensors) == 2:  # nearly always, and a loop takes twice the time
            place, other = self._places
            values[place], values[other] = tensors[0].data_ptr(), tensors[1].data_ptr()
        else:
            for place, tensor in zip(self._places, tensors, strict=True):
                values[place] = tensor.data_ptr()
        raw = self._raw_stream(self._index) if stream is None else stream.cuda_stream
        self._run(raw, values)

    def _first(self, stream: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        """Launch through Triton, and keep the compiled kernel."""
        named = dict(zip(self._names, tensors, strict=True))
        on_stream = contextlib.nullcontext() if self._on_cpu or stream is None else torch.cuda.stream(stream)
        with on_stream:
            compiled = self._kernel[(self._grid,)](**self._arguments, **named, **self._options)
        if self._on_cpu:
            return
        order = [parameter.name for parameter in self._kernel.params]
        everything = {**self._arguments, **named}
        # addresses: the launcher asks the driver about each object that is not a number
        plain = {name: v.data_ptr() if isinstance(v, torch.Tensor) else v for name, v in everything.items()}
        self._values = [plain[name] for name in order]
        self._places = tuple(order.index(name) for name in self._names)
        self._run = _compat.launcher_of(compiled, self._grid)
