"""The programs of `iris demo --backend gluon`: those of `iris_triton.demos`, compiled as Gluon.

They use no matrix instructions and no TMA, so they run on every target, CPU ranks included.
"""

from functools import partial

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.types import Demo
from iris_gluon.context import IrisDeviceCtx
from iris_gluon.layouts import default_layout
from iris_triton.demos import all_scatter, message_passing
from iris_triton.testing.languages import in_gluon


@gluon.jit
def dot(left, right, acc):
    """Return acc + left @ right, computed by the threads themselves."""
    layout: gl.constexpr = acc.type.layout
    left = gl.convert_layout(left.to(gl.float32), gl.DotOperandLayout(0, layout, 0))
    right = gl.convert_layout(right.to(gl.float32), gl.DotOperandLayout(1, layout, 0))
    return gl.dot_fma(left, right, acc)


def demos() -> tuple[Demo, ...]:
    """Return the programs in the order in which they are shown."""
    messages = in_gluon(message_passing.pass_messages)
    scatter = in_gluon(all_scatter.gemm_all_scatter, dot=dot, default_layout=default_layout)
    return (
        Demo(
            "message-passing", "producer and consumer with flags, in Gluon",
            partial(message_passing.run, kernel=messages, Context=IrisDeviceCtx),
        ),
        Demo(
            "gemm-all-scatter", "GEMM that stores its tiles to every rank, in Gluon",
            partial(all_scatter.run, kernel=scatter, Context=IrisDeviceCtx),
        ),
    )  # fmt: skip
