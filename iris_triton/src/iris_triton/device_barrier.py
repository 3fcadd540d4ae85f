"""Kernels that the host launches by themselves: of `ctx.device_barrier()`, of signals, and of puts to other nodes."""

from typing import Any

import triton
import triton.language as tl

from iris_core.device import context_words as _layout
from iris_triton.language import gin
from iris_triton.language.asm import follow, let_next_start
from iris_triton.language.flags import await_flag, await_flags, lanes_for, set_flag, set_flags
from iris_triton.launcher import BoundKernel, early_launch

_NETWORK = tl.constexpr(_layout.HEADER_WORDS + _layout.NETWORK_WORD)  # of the context tensor, without the heap bases


@triton.jit(
    do_not_specialize=["size", "timeout_ns", "status", "rank"], do_not_specialize_on_alignment=["words", "targets"]
)
def device_barrier(
    words, targets, size, timeout_ns, status, rank, sem: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr
):
    """Advance this rank's epoch on every member; wait until every member's epoch has reached it.

    The stores of kernels before this one on the stream are complete when it begins, so a release by this program hands
    them over as well.  Barriers with the same words do not overlap on a device.  The parameters are those of
    `iris_core.types.BarrierSlot`, `flags.await_flag` and `asm.follow`; LANES is a power of two, at least `size`.
    """
    follow(EARLY)
    status = tl.cast(status, tl.int64)
    lanes = lanes_for(LANES)
    member = lanes % size  # lanes beyond the group repeat a member
    there = tl.load(targets + member).to(words.dtype)
    epoch = tl.load(words + size) + 1
    set_flags(there, epoch, lanes < size, sem, "sys")
    order: tl.constexpr = "acquire" if sem == "release" else "relaxed"
    await_flags(words + member, epoch, lanes < size, "reached", order, "sys", timeout_ns, status, rank)
    let_next_start(EARLY)
    tl.store(words + size, epoch)


def bind(size: int, sem: str, spec: Any) -> BoundKernel:
    """Return a launcher of a barrier of `size` members; it takes `words` and `targets` of a slot."""
    early = early_launch(spec.device)
    said = {"timeout_ns": spec.timeout_ns, "status": spec.status_ptr, "rank": spec.rank}
    arguments = {**said, "size": size, "sem": sem, "LANES": triton.next_power_of_2(size), "EARLY": bool(early)}
    return BoundKernel(device_barrier, 1, arguments, ("words", "targets"), spec.device, {"num_warps": 1, **early})


@triton.jit(do_not_specialize=["value"], do_not_specialize_on_alignment=["word"])
def signal(word, value, ADD: tl.constexpr):
    """Set one word, or add to it; the stores of kernels and copies before it on the stream are complete."""
    value = tl.cast(value, word.dtype.element_ty)
    if ADD:
        tl.atomic_add(word, value, sem="release", scope="sys")
    else:
        set_flag(word, value, "release", "sys")


@triton.jit(do_not_specialize=["value", "timeout_ns", "status", "rank"], do_not_specialize_on_alignment=["word"])
def signal_wait(word, value, timeout_ns, status, rank, cmp: tl.constexpr):
    """Wait until `word <cmp> value`; the rest is as in `device_barrier`."""
    expected = tl.cast(value, word.dtype.element_ty)
    await_flag(word, expected, cmp, "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)


@triton.jit(do_not_specialize=["world", "peer", "source", "target", "nbytes", "word", "value"])
def copy_between_nodes(
    context, world, peer, source, target, nbytes, word, value, GETS: tl.constexpr, SIGNALS: tl.constexpr
):
    """Put a run of the heap to a rank on another node, or get one, and then add to a word there.

    See `iris_core.protocols.SupportsNetworkOptions`; `word` is an offset in bytes, too, and SIGNALS whether it adds.
    """
    network = context + _NETWORK + world
    if GETS:
        gin.get_bytes(network, peer, source, target, nbytes)
    elif nbytes > 0:
        gin.put_bytes(network, peer, target, source, nbytes)
    if SIGNALS:
        gin.add_to_word(network, peer, word, value)
    gin.flush(network)
