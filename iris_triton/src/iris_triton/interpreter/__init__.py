"""CPU executor: runs unmodified @triton.jit kernels on CPU tensors.

    from iris_triton import interpreter
    interpreter.enable()
    kernel[grid](cpu_tensor, ...)      # runs here; launches with GPU tensors go to the GPU as before

`enable` diverts launches whose tensors are on the CPU and nothing else, so the same process can compile and launch for
GPUs.  The docs page "CPU executor" says what is emulated and what is not.

Importing this package pulls in neither torch nor triton; its names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_triton.interpreter.config import CpuConfig as CpuConfig
    from iris_triton.interpreter.config import configuration as configuration
    from iris_triton.interpreter.config import configure as configure
    from iris_triton.interpreter.config import configured as configured
    from iris_triton.interpreter.entries import cpu_assembly as cpu_assembly
    from iris_triton.interpreter.entries import cpu_entry as cpu_entry
    from iris_triton.interpreter.errors import DeadlockError as DeadlockError
    from iris_triton.interpreter.errors import OutOfBoundsError as OutOfBoundsError
    from iris_triton.interpreter.launch import disable as disable
    from iris_triton.interpreter.launch import enable as enable
    from iris_triton.interpreter.launch import is_enabled as is_enabled
    from iris_triton.interpreter.memory.regions import allow_region as allow_region
    from iris_triton.interpreter.memory.regions import register_memory as register_memory
    from iris_triton.interpreter.memory.regions import unregister_memory as unregister_memory
    from iris_triton.interpreter.state import ProgramInfo as ProgramInfo

_HOMES = {
    "CpuConfig": "config",
    "DeadlockError": "errors",
    "OutOfBoundsError": "errors",
    "ProgramInfo": "state",
    "allow_region": "memory.regions",
    "configuration": "config",
    "configure": "config",
    "configured": "config",
    "cpu_assembly": "entries",
    "cpu_entry": "entries",
    "disable": "launch",
    "enable": "launch",
    "is_enabled": "launch",
    "register_memory": "memory.regions",
    "unregister_memory": "memory.regions",
}

__all__ = [
    "CpuConfig",
    "DeadlockError",
    "OutOfBoundsError",
    "ProgramInfo",
    "allow_region",
    "configuration",
    "configure",
    "configured",
    "cpu_assembly",
    "cpu_entry",
    "disable",
    "enable",
    "is_enabled",
    "register_memory",
    "unregister_memory",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"iris_triton.interpreter.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
