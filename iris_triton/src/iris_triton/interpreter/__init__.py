"""CPU executor: runs unmodified @triton.jit kernels on CPU tensors.

    from iris_triton import interpreter
    interpreter.enable()
    kernel[grid](cpu_tensor, ...)      # runs here; launches with GPU tensors go to the GPU as before

`enable` diverts launches whose tensors are on the CPU and nothing else, so the same process can compile and launch for
GPUs.  The docs page "CPU executor" says what is emulated and what is not.

Importing this package pulls in neither torch nor triton, nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from iris_triton.interpreter.config import CpuConfig, configuration, configure, configured
from iris_triton.interpreter.entries import cpu_entry
from iris_triton.interpreter.errors import DeadlockError, OutOfBoundsError
from iris_triton.interpreter.state import ProgramInfo

if TYPE_CHECKING:
    from iris_triton.interpreter.launch import disable, enable, is_enabled
    from iris_triton.interpreter.memory.regions import allow_region, register_memory, unregister_memory

__all__ = [
    "CpuConfig", "DeadlockError", "OutOfBoundsError", "ProgramInfo", "allow_region", "configuration", "configure",
    "configured", "cpu_entry", "disable", "enable", "is_enabled", "register_memory", "unregister_memory",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "launch" if name in ("disable", "enable", "is_enabled") else "memory.regions"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
