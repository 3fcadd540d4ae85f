"""Compiling kernels for GPUs on a machine that has none.

    compiled = compile_for(kernel, [torch.float32, torch.int64, 4096], {"BLOCK": 1024}, TARGETS["sm_90"])
    assert "st.global.v4.b32" in assembly(compiled)

A stand-in driver names the target, so that signatures come from the arguments as in a launch and
`triton.language.target_info` answers for the target.  The assemblers are those of Triton's own wheel.
Assembly of the wrong vendor ends the process with some versions of Triton: where a mismatch is possible, compile in a
subprocess.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton.backends.compiler import GPUTarget

from iris_triton import _compat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TARGETS: Mapping[str, GPUTarget] = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
"""The targets that every kernel must compile for."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """One kernel compiled for one target by `record`.

    Attributes:
        kernel: name of the kernel.
        target: a key of TARGETS.
        compiled: Triton's compiled kernel; `assembly(compiled)` is its text.
    """

    kernel: str
    target: str
    compiled: Any


def compile_for(
    kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, target: GPUTarget | str = "sm_90"
) -> Any:
    """Compile a kernel for a target.

    Args:
        kernel: a @triton.jit or @gluon.jit function.
        args: positional arguments as for a launch; a torch dtype stands for a 16-byte aligned pointer to such
            elements, a CPU tensor for a pointer of its own alignment.
        kwargs: keyword arguments, constexprs and options (num_warps, ...).
        target: a Triton GPUTarget or a key of TARGETS.

    Returns:
        Triton's compiled kernel.  Its `asm` maps "ttir", "ttgir", "llir" and "ptx" or "amdgcn" to text.

    Raises:
        triton.CompilationError: the kernel does not compile.
    """
    resolved = TARGETS[target] if isinstance(target, str) else target
    with _compat.active_target(resolved):
        return kernel.warmup(*args, grid=(1,), **(kwargs or {}))


def assembly(compiled: Any) -> str:
    """Return the PTX or AMDGCN text of a compiled kernel."""
    text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    return str(text)


@contextlib.contextmanager
def record(targets: Mapping[str, GPUTarget] = TARGETS) -> Iterator[list[Compilation]]:
    """Compile every kernel that is launched within the block for `targets` as well; the launch follows as usual.

    Meant for tests that run kernels on the CPU executor, which it enables.  What does not compile raises at the launch.

    Args:
        targets: what to compile for, by name.

    Yields:
        A list that grows by one entry per launch and target.  Triton caches repeats.

    Example:
        >>> with record() as compilations:  # doctest: +SKIP
        ...     kernel[grid](cpu_tensor, BLOCK=1024)
        >>> assert "st.global.v4.b32" in assembly(compilations[0].compiled)  # doctest: +SKIP
    """
    from iris_triton import interpreter

    interpreter.enable()
    compilations: list[Compilation] = []
    run = _compat.JITFunction.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup:
            for name, target in targets.items():
                compilations.append(Compilation(self.__name__, name, compile_for(self, args, kwargs, target)))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    _compat.JITFunction.run = recorded
    try:
        yield compilations
    finally:
        if _compat.JITFunction.run is recorded:  # else the executor was disabled within the block
            _compat.JITFunction.run = run
