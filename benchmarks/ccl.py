"""Collectives: ctx.ccl against NCCL, NCCL with symmetric windows, and torch's symmetric memory.

    python benchmarks/ccl.py [--ranks N] [--quick] [--only ccl.all_reduce] [--limit 1800]
    python benchmarks/ccl.py --only each_all_reduce       # every algorithm by name; `iris tune` does that with tables

One process per GPU; bf16; sizes are those of the full buffer (the output of all_gather, the input of reduce_scatter).
"iris" is what ctx.ccl chooses, by its tables (`iris tune`); "iris-triton" and "iris-nccl" are the best algorithms of
each plugin, by the same tables and models; "iris <algorithm>" is one that was named.  Each is measured in CUDA graphs;
"eager" ones also with the launches by the host.  All data is small integers, so that every sum is exact, and every
element of the output is compared with what it must be, in the timed configuration; before that the output is spoiled.
Place "ordinary": our tensors are torch's, as the peers' always are, and not on the heap.  Group "half": the two halves
of the ranks side by side, from four ranks on, as tensor parallelism has it.  `between_kernels`: times of a collective
and two short kernels around it.

"nccl-windows" is only given numbers if NCCL's kernel for symmetric windows was seen by the profiler; the counter says.
No NVLink multicast is used by anyone: NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1.

On CPU ranks (--device cpu) the same code runs with tiny sizes, so that it is tested; the times say nothing then.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from ccl_groups import WORLD, groups, part_of
from ccl_peers import OFF, Unavailable, is_symmetric_kernel, kernels_of, nccl_call, torch_symmetric, window_tensors

from iris_core import bench
from iris_core.ccl import Config
from iris_core.tuning.samples import SPOILED, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core import Iris
    from iris_core.bench import RunOptions, State
    from iris_core.dispatch.choice import Candidate

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DTYPE = torch.bfloat16
ONE_SHOT_LIMIT = 4 * MIB  # all inputs go to all ranks: above that, nobody would choose it
MAILBOX_LIMIT = 64 * MIB
EAGER_LIMIT = MIB

# How much faster than the best peer the choice should be in a graph, on 8 x H200; on fewer GPUs, never slower.
TARGETS = {
    #           all_reduce, all_gather, reduce_scatter, all_to_all
    64 * KIB: (2.6, 3.3, 3.3, 3.5),
    256 * KIB: (2.4, 3.6, 4.5, 3.5),
    1 * MIB: (1.5, 2.6, 3.3, 3.0),
    4 * MIB: (1.27, 1.6, 2.4, 2.3),
    16 * MIB: (1.2, 1.35, 1.55, 1.3),
    32 * MIB: (1.18, 1.3, 1.28, 1.2),
    128 * MIB: (1.02, 1.1, 1.06, 1.05),
    1 * GIB: (1.0, 1.03, 1.0, 1.0),
}
HEAP, ORDINARY = "heap", "ordinary"
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def sizes(options: RunOptions) -> list[int]:
    """Bytes of the full buffer."""
    if options.device == "cpu":
        return [KIB]
    return [KIB, 64 * KIB, MIB, 16 * MIB] if options.quick else bench.power_of_two(KIB, GIB)


# -- what is measured -------------------------------------------------------------------------------------------------
def measured(name: str, nbytes: int) -> bool:
    """Whether an algorithm is worth the time at a size."""
    if "one_shot" in name:
        return nbytes <= ONE_SHOT_LIMIT
    return not name.endswith(("mailbox", "_two_shot")) or nbytes <= MAILBOX_LIMIT


def target_of(op: str, nbytes: int, num_ranks: int) -> float | None:
    """The ratio to reach; None at sizes between two that have a bound of their own."""
    if num_ranks != 8:
        return 1.0
    if nbytes <= 64 * KIB:
        nbytes = 64 * KIB
    if nbytes == 512 * MIB:
        nbytes = GIB
    return TARGETS[nbytes][OPS.index(op)] if nbytes in TARGETS else None


def best_of_plugins(usable: list[Candidate]) -> dict[str, Config]:
    """Configs that name the best algorithm of each plugin, by the plugin's label.

    What was measured at the nearest point comes first, also if tensors lay elsewhere there.
    """
    found: dict[str, Config] = {}
    for each in sorted(usable, key=lambda one: (one.entry is None, one.entry.seconds if one.entry else one.seconds)):
        found.setdefault(
            f"iris-{each.provider}", Config(algorithm=each.name, **(each.entry.config if each.entry else {}))
        )
    return found


def declare(state: State, ctx: Iris, op: str, *, each: bool) -> None:
    """Declare the providers of an operation at one size.

    Args:
        state, ctx: as benchmarks get them.
        op: the operation.
        each: every algorithm by its name, without the peers; else the choice, and the peers.
    """
    part, nbytes = part_of(ctx, state["group"]), state["nbytes"]
    rank, size = part.rank, part.size
    if size < 2:
        state.skip("needs two ranks or more")
    sample = Sample.of_bytes(op, DTYPE, rank, size, nbytes)
    state.resources.enter_context(ctx.scope())
    out, inp = sample.tensors(ctx)
    assert out is not None
    assert inp is not None
    if not each and state["place"] == ORDINARY:
        out, inp = torch.empty_like(out), inp.clone()
    state.set_bytes(sample.nbytes, bus_factor=(size - 1) / size * (2 if op == "all_reduce" else 1))
    run = partial(getattr(ctx.ccl, op), group=part.members)
    usable = [found for found in ctx.ccl.explain(op, out, inp, group=part.members).candidates if found.ok]
    if each:
        named = {f"iris {c.name}": Config(algorithm=c.name) for c in usable if measured(c.name, nbytes)}
    else:
        named = best_of_plugins(usable)
    timers = ["graph"] + ["events"] * (nbytes <= EAGER_LIMIT) if state.on_gpu else [None]
    for timer in timers:
        suffix = " eager" if timer == "events" else ""
        if timer:
            state.set_timer(timer)

        def check(tensor: torch.Tensor = out) -> bool:
            return sample.is_right(tensor)

        def spoil(tensor: torch.Tensor = out) -> None:
            tensor.fill_(SPOILED)

        state.provider(f"iris{suffix}", lambda: run(out, inp), check=check, prepare=spoil)
        for label, config in named.items():
            state.provider(
                f"{label}{suffix}",
                lambda config=config: run(out, inp, config=config),  # type: ignore[misc]
                check=check,
                prepare=spoil,
            )
        if state.on_gpu and not each:
            declare_peers(state, sample, out, inp, suffix, part.process_group)
            bound = target_of(op, nbytes, size)
            if bound is not None and timer == "graph":
                state.target("iris", "ratio_to_best_peer", at_least=bound)


def declare_peers(state: State, sample: Sample, out: torch.Tensor, inp: torch.Tensor, suffix: str, group: Any) -> None:
    """Declare the other libraries, with ordinary tensors of their own; only NCCL on halves of the ranks."""
    op = sample.op

    def provider(
        name: str, call: Callable[[], object], own_out: torch.Tensor, refill: Callable[[], object] | None = None
    ) -> None:
        # Who adds up in its input is checked by one call on fresh data: repeated, the sums grow.
        def prepare() -> None:
            own_out.fill_(SPOILED)
            if refill is not None:
                refill()

        def check() -> bool:
            if refill is not None:
                prepare()
                call()
                torch.cuda.synchronize()
            return sample.is_right(own_out)

        state.provider(name + suffix, call, check=check, prepare=prepare, peer=not suffix)

    def nccl(name: str, call: Callable[[], object], own_out: torch.Tensor, own_inp: torch.Tensor) -> None:
        in_place = op == "all_reduce"
        provider(name, call, own_out, (lambda: own_out.copy_(own_inp)) if in_place else None)

    own_out, own_inp = torch.empty_like(out), inp.clone()
    call = nccl_call(op, own_out, own_inp, group)
    call()  # its communicator exists from here on, which registering windows needs
    nccl("nccl", call, own_out, own_inp)
    if group is not None:
        return
    try:
        window_out, window_inp = state.resources.enter_context(window_tensors(out, inp))
        window_inp.copy_(inp)
        call_windows = nccl_call(op, window_out, window_inp)
        kernels = kernels_of(call_windows)
        if not any(is_symmetric_kernel(kernel) for kernel in kernels):
            raise Unavailable(f"NCCL did not use the windows, it launched {', '.join(kernels) or 'no kernel'}")

        nccl("nccl-windows", call_windows, window_out, window_inp)
    except Unavailable as error:
        state.skip_provider(f"nccl-windows{suffix}", str(error))
    if op == "all_reduce":
        for kind in ("one_shot", "two_shot"):
            target = torch.empty_like(out)
            try:
                call, refill = torch_symmetric(kind, inp, target)
                provider(f"torch {kind}", call, target, refill)
            except Unavailable as error:
                state.skip_provider(f"torch {kind}{suffix}", str(error))


@bench.register
@bench.axis("group", groups)
@bench.axis("place", [ORDINARY, HEAP])
@bench.axis("nbytes", sizes)
def all_reduce(state: State, ctx: Iris) -> None:
    """Sum of all inputs, to all."""
    declare(state, ctx, "all_reduce", each=False)


@bench.register
@bench.axis("group", groups)
@bench.axis("place", [ORDINARY, HEAP])
@bench.axis("nbytes", sizes)
def all_gather(state: State, ctx: Iris) -> None:
    """All inputs, to all."""
    declare(state, ctx, "all_gather", each=False)


@bench.register
@bench.axis("group", groups)
@bench.axis("place", [ORDINARY, HEAP])
@bench.axis("nbytes", sizes)
def reduce_scatter(state: State, ctx: Iris) -> None:
    """Sum of all inputs, a part to each."""
    declare(state, ctx, "reduce_scatter", each=False)


@bench.register
@bench.axis("group", groups)
@bench.axis("place", [ORDINARY, HEAP])
@bench.axis("nbytes", sizes)
def all_to_all(state: State, ctx: Iris) -> None:
    """A part of every input to each."""
    declare(state, ctx, "all_to_all", each=False)


@bench.register
@bench.axis("group", [WORLD])
@bench.axis("place", [ORDINARY])
@bench.axis("collective", OPS)
@bench.axis("nbytes", lambda options: [KIB] if options.device == "cpu" else [KIB, 32 * KIB, 256 * KIB, MIB])
def between_kernels(state: State, ctx: Iris) -> None:
    """A collective between two kernels of about 5 us, as layers have it; "kernels" are these two alone."""
    numbers = torch.ones(KIB if ctx.device == "cpu" else 4 * MIB, dtype=DTYPE, device=ctx.device)
    add = state.provider

    def provider(name: str, call: Callable[[], object], **how: Any) -> None:
        add(name, lambda: (numbers.mul_(1), call(), numbers.mul_(1)), **how)

    state.provider = provider  # type: ignore[assignment, method-assign]
    declare(state, ctx, state["collective"], each=False)
    for timer in ("graph", "events") if state.on_gpu else ():
        state.set_timer(timer)
        add("kernels" + " eager" * (timer == "events"), lambda: (numbers.mul_(1), numbers.mul_(1)), check=None)


@bench.register(by_default=False)
@bench.axis("group", groups)
@bench.axis("nbytes", sizes)
def each_all_reduce(state: State, ctx: Iris) -> None:
    """Sum of all inputs, to all: every algorithm."""
    declare(state, ctx, "all_reduce", each=True)


@bench.register(by_default=False)
@bench.axis("group", groups)
@bench.axis("nbytes", sizes)
def each_all_gather(state: State, ctx: Iris) -> None:
    """All inputs, to all: every algorithm."""
    declare(state, ctx, "all_gather", each=True)


@bench.register(by_default=False)
@bench.axis("group", groups)
@bench.axis("nbytes", sizes)
def each_reduce_scatter(state: State, ctx: Iris) -> None:
    """Sum of all inputs, a part to each: every algorithm."""
    declare(state, ctx, "reduce_scatter", each=True)


@bench.register(by_default=False)
@bench.axis("group", groups)
@bench.axis("nbytes", sizes)
def each_all_to_all(state: State, ctx: Iris) -> None:
    """A part of every input to each: every algorithm."""
    declare(state, ctx, "all_to_all", each=True)


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    min_ranks=2,
    heap_size="12GiB",  # workspaces of all algorithms that are named take 4
    environ=OFF,
    on_cpu={
        "heap_size": "16MiB",
        "environ": {"IRIS_CCL_WORKSPACE": "1MiB"},
    },
    results="results/ccl-{ranks}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
