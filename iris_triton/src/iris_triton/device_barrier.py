"""The barrier between devices as a kernel of its own: what `ctx.device_barrier()` launches."""
# mypy: ignore-errors

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from iris_triton.flags import await_flags, lanes_for, set_flags
from iris_triton.intrinsics import follow
from iris_triton.launcher import early_launch


@triton.jit(do_not_specialize=["size", "timeout_ns", "status", "rank"])
def device_barrier(
    words, targets, size, timeout_ns, status, rank, sem: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr
):
    """Raise the own word on every member; wait until all own words are as high.

    The stores of kernels before this one on the stream are complete when it begins, so a release by this program hands
    them over as well.

    Args:
        words, targets, size: see `iris_core.device_barrier.BarrierSlot`.
        timeout_ns, status, rank: see `iris_triton.flags.await_flag`.
        sem: "release" or "relaxed".
        LANES: a power of two, at least `size`.
        EARLY: see `iris_triton.intrinsics.follow`.
    """
    follow(EARLY)
    status = tl.cast(status, tl.int64)
    lanes = lanes_for(LANES)
    member = lanes % size  # lanes beyond the group repeat a member
    there = tl.load(targets + member).to(words.dtype)
    epoch = tl.load(words + size) + 1
    set_flags(there, epoch, lanes < size, sem, "sys")
    if sem == "release":
        await_flags(words + member, epoch, lanes < size, "reached", "acquire", "sys", timeout_ns, status, rank)
    else:
        await_flags(words + member, epoch, lanes < size, "reached", "relaxed", "sys", timeout_ns, status, rank)
    tl.store(words + size, epoch)


def launch(slot: Any, spec: Any, sem: str, stream: Any) -> None:
    """Launch a barrier on a torch stream; None is the current one."""
    early = early_launch(spec.device)
    with torch.cuda.stream(stream) if stream is not None and spec.device != "cpu" else contextlib.nullcontext():
        device_barrier[(1,)](
            slot.words,
            slot.targets,
            slot.size,
            spec.timeout_ns,
            spec.status_ptr,
            spec.rank,
            sem,
            LANES=triton.next_power_of_2(slot.size),
            EARLY=bool(early),
            num_warps=1,
            **early,
        )
