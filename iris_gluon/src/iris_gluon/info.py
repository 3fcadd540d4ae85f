"""Descriptions of the plugins of this distribution.  Imports nothing heavy."""

from dataclasses import replace

from iris_triton.info import TRITON_INFO

_SUMMARY = "Gluon kernels, on GPUs and (through the CPU executor) on CPUs"
GLUON_INFO = replace(TRITON_INFO, name="gluon", summary=_SUMMARY, priority=0)
