"""Vendor assembly, for what Triton's language lacks.

Every function chooses its assembly by the target that the kernel is compiled for, and has a CPU entry, which the CPU
executor calls instead.  A function says whether its result is uniform: the same for all threads of a program.  Triton
takes scalars for uniform, so a loop or branch that contains a barrier must not depend on a scalar that is not.
"""

import numpy as np
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import is_cuda, is_hip

from iris_triton.interpreter import entries
from iris_triton.interpreter.entries import cpu_entry, read_clock
from iris_triton.language.blocks import lanes, num_threads

_NO_TARGET = tl.constexpr("iris_triton.language.asm knows NVIDIA and AMD GPUs and the CPU executor, not this target")


@triton.jit
def read_realtime():
    """Ticks of the device's constant clock as int64: 1 ns on NVIDIA and the CPU, 10 ns (100 MHz) on AMD.

    Every thread reads for itself: not uniform.
    """
    tl.static_assert(is_cuda() or is_hip(), _NO_TARGET)
    text: tl.constexpr = "mov.u64 $0, %globaltimer;" if is_cuda() else "s_memrealtime $0\ns_waitcnt lgkmcnt(0)"
    register: tl.constexpr = "=l" if is_cuda() else "=s"
    return tl.inline_asm_elementwise(text, register, [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def ticks_after(block):
    """Return `read_realtime` of every thread, read when its elements of a block of 32-bit words are there."""
    tl.static_assert(is_cuda() or is_hip(), _NO_TARGET)
    if is_cuda():
        text: tl.constexpr = "{ .reg .b32 arrived; mov.b32 arrived, $1; mov.u64 $0, %globaltimer; }"
        return tl.inline_asm_elementwise(text, "=l,r", [block], dtype=tl.int64, is_pure=False, pack=1)
    else:
        text: tl.constexpr = "s_memrealtime $0 ; $1\ns_waitcnt lgkmcnt(0)"
        return tl.inline_asm_elementwise(text, "=s,v", [block], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def get_cu_id():
    """Return the ID of the multiprocessor (NVIDIA) or of the compute unit in its die (AMD); 0 on the CPU.  Uniform."""
    tl.static_assert(is_cuda() or is_hip(), _NO_TARGET)
    if is_cuda():
        return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    else:  # HW_REG_HW_ID of gfx9: bits 8..11 are the unit, 13..15 the shader engine
        text: tl.constexpr = "s_getreg_b32 $0, hwreg(HW_REG_HW_ID, 0, 32)"
        raw = tl.inline_asm_elementwise(text, "=s", [], dtype=tl.int32, is_pure=True, pack=1)
        return ((raw >> 8) & 15) | (((raw >> 13) & 7) << 4)


@triton.jit
def get_xcc_id():
    """Return the ID of the accelerator die in the device (AMD); 0 elsewhere.  Uniform."""
    if is_hip():
        return tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID, 0, 16)", "=s", [], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.cast(0, tl.int32)


@triton.jit
def wait_clock_ns(timeout_ns):
    """Return the time in nanoseconds (int64) for a wait bounded by `timeout_ns` (int64; unbounded if not positive).

    Uniform: synchronises the threads of the program, so not for divergent code.  The CPU executor assumes that programs
    which read a clock may proceed without a store; an unbounded wait cannot.
    """
    # A maximum over a block with an element in every thread is the same in all.  More elements would cost registers.
    now = ticks_after(lanes(num_threads()))
    if is_hip():
        now = now * 10
    return tl.max(now, axis=0)


@triton.jit
def wait_stores():
    """Wait until every store that this thread has issued is acknowledged.

    AMD needs it before a barrier after which one wave releases the stores of all: the barrier itself does not wait
    for the memory counter.  On NVIDIA the barrier and the release are cumulative, so there is nothing to do.
    """
    if is_hip():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait for the previous kernel on the stream to complete (programmatic dependent launch).

    Must come first in a kernel that may be launched with `iris_triton.launcher.early_launch`.  Such a kernel starts
    when the previous one calls `let_next_start`, or ends; it must not access memory before this wait.  EARLY says
    whether it was launched that way.  (CUDA C++ Programming Guide, programmatic dependent launch; NVIDIA, Hopper and
    newer.)
    """
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Let the next kernel on the stream start, if it was launched early, once all programs have called this.

    It may occupy all multiprocessors while it waits for the end of this one.  So this kernel must not wait for a peer
    afterwards: the peer may wait for a kernel of another stream of this device, which would get no multiprocessor.
    A barrier of the program's threads comes first, as they may wait for different words.  EARLY says whether this
    kernel was launched early.
    """
    if EARLY:
        gdc_launch_dependents()


@cpu_entry(wait_clock_ns)
def _cpu_wait_clock(program, timeout_ns):
    return np.int64(read_clock(program) if timeout_ns > 0 else entries.clock())


cpu_entry(read_realtime)(lambda program: np.int64(read_clock(program)))
for _unit in (get_cu_id, get_xcc_id):
    cpu_entry(_unit)(lambda program: np.int32(0))
cpu_entry(wait_stores)(lambda program: None)
