"""Compiling kernels for GPUs on a machine that has none.

    compiled = compile_for(kernel, [torch.float32, torch.int64, 4096], {"BLOCK": 1024}, TARGETS["sm_90"])
    assert "st.global.v4.b32" in assembly(compiled)

A stand-in driver names the target, so that signatures come from the arguments as in a launch and
`triton.language.target_info` answers for the target.  The assemblers are those of Triton's own wheel.
Assembly of the wrong vendor ends the process with some versions of Triton: where a mismatch is possible, compile in a
subprocess.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget

from iris_triton import _compat

TARGETS: Mapping[str, GPUTarget] = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
"""The targets that every kernel must compile for."""


def compile_for(
    kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, target: GPUTarget | str = "sm_90"
) -> Any:
    """Compile a kernel for a target, a Triton GPUTarget or a key of TARGETS, and return Triton's compiled kernel.

    Args:
        kernel: a @triton.jit or @gluon.jit function; a triton.CompilationError if it does not compile.
        args: positional arguments as for a launch; a torch dtype stands for a 16-byte aligned pointer to such
            elements, a CPU tensor for a pointer of its own alignment.
        kwargs: keyword arguments, constexprs and options (num_warps, ...).
    """
    resolved = TARGETS[target] if isinstance(target, str) else target
    with _compat.active_target(resolved):
        return kernel.warmup(*args, grid=(1,), **(kwargs or {}))


def assembly(compiled: Any) -> str:
    """Return the PTX or AMDGCN text of a compiled kernel."""
    return str(compiled.asm.get("ptx") or compiled.asm["amdgcn"])
