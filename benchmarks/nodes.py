"""Collectives between two nodes: by levels against flat NCCL (on CPUs gloo), the GPUs of one host in two halves.

    python benchmarks/nodes.py [--ranks N]                             # 4 GPUs or more, an even number
    python benchmarks/nodes.py --device cpu                            # the same code on 4 CPU ranks

IRIS_NODES divides the ranks for us, NCCL_HOSTID for NCCL: it sends nothing by NVLink or PCIe between the halves, but
over sockets, in both providers.  bf16, ordinary tensors, launched by the host, every element verified.

Of `between`, "iris" is the choice, "iris hierarchical" the collective by levels, "iris nccl" (or gloo) the flat one;
"nccl" is the call of torch.distributed.  The target: by levels at least as fast as flat.  `chunks` has the collective
by levels in several numbers of chunks: in one, nothing overlaps, and each step waits for the one before.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from ccl import DTYPE, KIB, MIB, OPS
from ccl_peers import OFF, nccl_call

from iris_core import Iris, bench
from iris_core.ccl import Config
from iris_core.tuning.samples import SPOILED, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.bench import RunOptions, State

LEVELS = "hierarchical"
NUMBERS = 1, 2, 4, 8


def two_nodes(*arguments: Any, **options: Any) -> Iris:
    """Open the context of a rank in the first or the second half of all; collective, like that."""
    half = int(os.environ["WORLD_SIZE"]) // 2
    os.environ |= {"IRIS_NODES": f"2x{half}", "NCCL_HOSTID": f"half {int(os.environ['RANK']) // half}"}
    return Iris(*arguments, **options)


def sizes(options: RunOptions) -> list[int]:
    """Bytes of the full buffer."""
    if options.device == "cpu":
        return [64 * KIB]
    return [MIB, 16 * MIB, 128 * MIB]


class Calls(NamedTuple):
    """A collective of ctx.ccl, its data, and what checks its output."""

    sample: Sample
    call: Callable[..., Any]
    out: torch.Tensor
    inp: torch.Tensor
    checks: dict[str, Any]


def prepared(state: State, ctx: Iris) -> Calls:
    """Make the data of a benchmark, and say what it moves and how it is timed."""
    op = state["op"]
    sample = Sample.of_bytes(op, DTYPE, ctx.cur_rank, ctx.num_ranks, state["nbytes"])
    on_heap, inp = sample.tensors(ctx)
    assert on_heap is not None
    assert inp is not None
    out, inp = torch.empty_like(on_heap), inp.clone()
    size = ctx.num_ranks
    state.set_bytes(sample.nbytes, bus_factor=(size - 1) / size * (2 if op == "all_reduce" else 1))
    if state.on_gpu:
        state.set_timer("events")
    checks: dict[str, Any] = {"check": partial(sample.is_right, out), "prepare": partial(out.fill_, SPOILED)}
    return Calls(sample, getattr(ctx.ccl, op), out, inp, checks)


@bench.register
@bench.axis("op", list(OPS))
@bench.axis("nbytes", sizes)
def between(state: State, ctx: Iris) -> None:
    """One collective of all ranks, which are on two nodes."""
    op, flat = state["op"], "nccl" if state.on_gpu else "gloo"
    sample, call, out, inp, checks = prepared(state, ctx)
    state.provider("iris", lambda: call(out, inp), baseline=flat, **checks)
    for name in (LEVELS, flat):
        config = Config(algorithm=name)
        state.provider(f"iris {name}", partial(call, out, inp, config=config), baseline=flat, **checks)
    own_out, own_inp = torch.empty_like(out), inp.clone()
    theirs = nccl_call(op, own_out, own_inp)

    def prepare() -> None:
        if op == "all_reduce":  # in place: sums grow from call to call
            own_out.copy_(own_inp)
        else:
            own_out.fill_(SPOILED)

    def is_right() -> bool:
        prepare()
        theirs()
        return sample.is_right(own_out)

    state.provider(flat, theirs, check=is_right, prepare=prepare, peer=True)
    if state.on_gpu:  # on CPUs, kernels are emulated
        state.target(f"iris {LEVELS}", "ratio", at_least=1.0)


@bench.register
@bench.axis("op", [op for op in OPS if op != "all_to_all"])  # which has no chunks
@bench.axis("nbytes", sizes)
def chunks(state: State, ctx: Iris) -> None:
    """One collective of all ranks by levels, in one chunk and in more."""
    calls = prepared(state, ctx)
    for number in NUMBERS:
        config = Config(algorithm=LEVELS, chunks=number)
        name = f"{number} chunk{'s' * (number > 1)}"
        state.provider(
            name, partial(calls.call, calls.out, calls.inp, config=config), baseline="1 chunk", **calls.checks
        )


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    min_ranks=4,
    heap_size="2GiB",
    environ=OFF,
    context="nodes:two_nodes",
    on_cpu={"heap_size": "32MiB"},
    results="results/nodes-{ranks}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
