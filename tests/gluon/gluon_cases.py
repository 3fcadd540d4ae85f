"""Kernels in Gluon that must compile for every GPU target, and what must be in their assembly.

The cases of the language and of tiles are Triton's, whose kernels serve both languages: blocks of four elements per
thread and more keep their 16-byte accesses, whatever the layout's warp size.
"""

import dataclasses
import functools

import compile_language
import compile_tiles
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon.context import IrisDeviceCtx
from iris_gluon.layouts import default_layout
from iris_triton.testing.languages import in_gluon


@gluon.jit
def from_argument(IrisDeviceCtx: gl.constexpr, context, x):
    """The form of AMD's Iris: the class is an argument."""
    ctx = IrisDeviceCtx.initialize(context)
    i = gl.arange(0, 1024, layout=default_layout([1024], vector=4))
    ctx.store(x + i, 1.0, (ctx.cur_rank + 1) % ctx.num_ranks)


def compile_cases():
    """Return a case for every device function in representative element types and for tiles."""
    (stores,) = (case for case in compile_language.compile_cases() if case.name == "initialize")
    arguments = (IrisDeviceCtx, torch.int64, torch.float32)
    translated = functools.cache(functools.partial(in_gluon, default_layout=default_layout))
    return [
        *compile_language.language_cases(IrisDeviceCtx, functools.cache(in_gluon)),
        *compile_tiles.compile_cases(IrisDeviceCtx, translated),
        dataclasses.replace(stores, kernel=from_argument, args=arguments, kwargs={}),
    ]
