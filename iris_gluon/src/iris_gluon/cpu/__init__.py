"""Gluon on the CPU: unmodified @gluon.jit kernels on CPU tensors, in the executor of iris_triton.

    import iris_gluon.cpu
    iris_triton.cpu.enable()
    kernel[grid](cpu_tensor, ..., num_warps=4)

Importing it tells the executor who runs Gluon kernels, and nothing more: neither torch nor triton is imported.
"""

from __future__ import annotations

from iris_triton.cpu.dialects import register_dialect

register_dialect("gluon", "iris_gluon.cpu.dialect:gluon_dialect")
