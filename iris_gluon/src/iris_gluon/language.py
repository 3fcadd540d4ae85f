"""Device functions for Gluon kernels: those of `iris_triton.language`, whose source serves both languages.

Masks and other operands have the layout of the pointers, and so have results; a scalar operand goes with pointers of
any layout.  Before loads by TMA of what was awaited comes `iris_gluon.bulk.fence_async_global`.

The same functions with the ranks filled in are methods of `iris_gluon.IrisDeviceCtx`.
"""

from iris_triton.language import *  # noqa: F403
from iris_triton.language import __all__ as __all__
