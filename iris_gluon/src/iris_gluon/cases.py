"""Kernels that must compile for every GPU target, and what must be in their assembly.

The cases of the language and of tiles are those of `iris_triton.testing.cases`, whose kernels serve both languages:
blocks of four elements per thread and more keep their 16-byte accesses, whatever the layout's warp size.  The cases of
the collectives are the kernels of `iris_gluon.collectives`.
"""
# mypy: ignore-errors

import dataclasses

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.types import CompileCase
from iris_gluon.collectives import cases as _collectives
from iris_gluon.context import IrisDeviceCtx
from iris_gluon.layouts import default_layout
from iris_triton.testing import cases as _triton


@gluon.jit
def from_argument(IrisDeviceCtx: gl.constexpr, context, x):
    """The form of AMD's Iris: the class is an argument."""
    ctx = IrisDeviceCtx.initialize(context)
    i = gl.arange(0, 1024, layout=default_layout([1024], vector=4))
    ctx.store(x + i, 1.0, (ctx.cur_rank + 1) % ctx.num_ranks)


def compile_cases() -> list[CompileCase]:
    """Return a case for every device function in representative element types, and for every tile-level collective."""
    (stores,) = (case for case in _triton.compile_cases() if case.name == "initialize")
    arguments = (IrisDeviceCtx, torch.int64, torch.float32)
    by_argument = dataclasses.replace(stores, kernel=from_argument, args=arguments, kwargs={})
    return [*_triton.gluon_cases(IrisDeviceCtx, default_layout), by_argument, *_collectives.compile_cases()]
