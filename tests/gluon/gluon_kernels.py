"""The kernels of tests/multirank in Gluon.  The module stands for DeviceContext in them: Gluon's needs no ranks."""

import functools
import sys

from triton.experimental import gluon

from iris_gluon import IrisDeviceCtx, _compat
from iris_triton._compat import JITFunction
from iris_triton.testing.languages import in_gluon


@gluon.jit
def initialize(context, rank, world):
    return IrisDeviceCtx.initialize(context)


@gluon.jit
def from_tensor(context, world):
    return IrisDeviceCtx.initialize(context)


@functools.cache
def kernels_of(jobs):
    """All kernels of a module of jobs by their names."""
    found = {name: each for name, each in vars(jobs).items() if isinstance(each, JITFunction)}
    here = sys.modules[__name__]
    return {name: in_gluon(each, DeviceContext=here, threads_meet=_compat.barrier) for name, each in found.items()}
