"""Gluon on the CPU: unmodified @gluon.jit kernels on CPU tensors, in the executor of iris_triton.

    import iris_gluon.interpreter
    iris_triton.interpreter.enable()
    kernel[grid](cpu_tensor, ..., num_warps=4)

Importing it registers Gluon with the executor; it imports neither torch nor triton.
"""

from iris_triton.interpreter.entries import FACTORIES

FACTORIES["gluon"] = "iris_gluon.interpreter.dialect:gluon_dialect"
