"""Collectives: every algorithm of ctx.ccl against NCCL, NCCL with symmetric windows, and torch's symmetric memory.

    python benchmarks/ccl.py [--ranks N] [--quick] [--only all_reduce] [--limit 1800]

One process per GPU; bf16; sizes are those of the full buffer (the output of all_gather, the input of reduce_scatter).
"iris" is what ctx.ccl chooses, "iris <algorithm>" one that was named.  Each is measured in CUDA graphs; "eager" ones
also with the launches by the host.  All data is small integers, so that every sum is exact, and every element of the
output is compared with what it must be, in the timed configuration; before that the output is spoiled.

"nccl-windows" is only given numbers if NCCL's kernel for symmetric windows was seen by the profiler; the counter says.
No NVLink multicast is used by anyone: NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1.

On CPU ranks (--device cpu) the same code runs with tiny sizes, so that it is tested; the times say nothing then.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from ccl_peers import Unavailable, is_symmetric_kernel, kernels_of, nccl_call, torch_symmetric, window_tensors

from iris_core import bench
from iris_core.ccl import Config
from iris_core.ccl.samples import SPOILED, Sample
from iris_core.errors import IrisError

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core import Iris
    from iris_core.bench import RunOptions, State

RESULTS = pathlib.Path(__file__).parent / "results"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DTYPE = torch.bfloat16
ONE_SHOT_LIMIT = 4 * MIB  # all inputs go to all ranks: above that, nobody would choose it
MAILBOX_LIMIT = 64 * MIB
EAGER_LIMIT = MIB


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


def declare(state: State, ctx: Iris, op: str) -> None:
    """Declare all providers of an operation at one size."""
    rank, size, nbytes = ctx.cur_rank, ctx.num_ranks, state["nbytes"]
    if size < 2:
        state.skip("needs two ranks or more")
    sample = Sample.of_bytes(op, DTYPE, rank, size, nbytes)
    state.enter(ctx.scope())
    out, inp = sample.tensors(ctx)
    assert out is not None
    assert inp is not None
    state.set_bytes(sample.nbytes)
    run = getattr(ctx.ccl, op)
    names = [each.name for each in ctx.ccl.explain(op, out, inp).candidates if each.ok and measured(each.name, nbytes)]
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
        for name in names:
            config = Config(algorithm=name)
            state.provider(
                f"iris {name}{suffix}",
                lambda config=config: run(out, inp, config=config),  # type: ignore[misc]
                check=check,
                prepare=spoil,
            )
        if state.on_gpu:
            declare_peers(state, sample, out, inp, suffix)


def declare_peers(state: State, sample: Sample, out: torch.Tensor, inp: torch.Tensor, suffix: str) -> None:
    """Declare the other libraries, with ordinary tensors of their own."""
    op = sample.op

    def provider(name: str, call: Callable[[], object], own_out: torch.Tensor, own_inp: torch.Tensor) -> None:
        # NCCL's all_reduce is timed in place: repeated, its sums grow, so what is checked is one call on fresh data.
        in_place = op == "all_reduce" and name.startswith("nccl")

        def prepare() -> None:
            own_out.copy_(own_inp) if in_place else own_out.fill_(SPOILED)

        def check() -> bool:
            if in_place:
                own_out.copy_(own_inp)
                call()
                torch.cuda.synchronize()
            return sample.is_right(own_out)

        state.provider(name + suffix, call, check=check, prepare=prepare, peer=not suffix)

    own_out, own_inp = torch.empty_like(out), inp.clone()
    provider("nccl", nccl_call(op, own_out, own_inp), own_out, own_inp)
    try:
        window_out, window_inp, pool = window_tensors(out, inp)
        window_inp.copy_(inp)
        call = nccl_call(op, window_out, window_inp)
        kernels = kernels_of(call)
        if not any(is_symmetric_kernel(kernel) for kernel in kernels):
            raise Unavailable(f"NCCL did not use the windows, it launched {', '.join(kernels) or 'no kernel'}")

        def windowed(pool: Any = pool) -> object:  # the pool must live as long as the call
            return call()

        provider("nccl-windows", windowed, window_out, window_inp)
    except Unavailable as error:
        state.skip_provider(f"nccl-windows{suffix}", str(error))
    if op == "all_reduce":
        for kind in ("one_shot", "two_shot"):
            target = torch.empty_like(out)
            try:
                provider(f"torch {kind}", torch_symmetric(kind, inp, target), target, own_inp)
            except Unavailable as error:
                state.skip_provider(f"torch {kind}{suffix}", str(error))


@bench.register
@bench.axis("nbytes", sizes)
def all_reduce(state: State, ctx: Iris) -> None:
    """Sum of all inputs, to all."""
    declare(state, ctx, "all_reduce")


@bench.register
@bench.axis("nbytes", sizes)
def all_gather(state: State, ctx: Iris) -> None:
    """All inputs, to all."""
    declare(state, ctx, "all_gather")


@bench.register
@bench.axis("nbytes", sizes)
def reduce_scatter(state: State, ctx: Iris) -> None:
    """Sum of all inputs, a part to each."""
    declare(state, ctx, "reduce_scatter")


@bench.register
@bench.axis("nbytes", sizes)
def all_to_all(state: State, ctx: Iris) -> None:
    """A part of every input to each."""
    declare(state, ctx, "all_to_all")


def main() -> int:
    """Choose the ranks, run, write results/ccl-<ranks>.json."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = bench.parser(__doc__, ranks=max(2, gpus))
    parser.set_defaults(heap_size="6GiB")
    args = parser.parse_args()
    args.device = args.device or "cuda"
    if args.device == "cuda" and not 2 <= args.ranks <= gpus:
        print(
            f"ccl: {args.ranks} ranks need as many GPUs, and two at least; torch sees {gpus} here. "
            "`--device cpu --ranks 2` runs the same code on CPU ranks; its times say nothing about GPUs",
            file=sys.stderr,
        )
        return 2
    if args.device == "cpu":
        args.heap_size = "16MiB"
        os.environ.setdefault("IRIS_TRITON__EMULATE_FAST", "1")
    os.environ.setdefault("IRIS_CCL_WORKSPACE", "512MiB" if args.device == "cuda" else "1MiB")
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
    name = f"ccl-{args.ranks}"
    out = args.out or (str(RESULTS / f"{name}.json") if args.device == "cuda" and not args.only else "")
    try:
        report = bench.run(bench.registered(source=__file__, pattern=args.only), bench.options_from(args), name=name)
    except IrisError as error:
        print(f"ccl: {error}", file=sys.stderr)
        return 2
    return bench.finish(report, out=out, enforce=args.enforce)


if __name__ == "__main__":
    sys.exit(main())
