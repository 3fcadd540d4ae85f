"""Look whether lines of 128 bytes arrive whole at a peer (`iris_triton.collectives.packets.fabric`), and keep that.

    torchrun --nproc-per-node=4 benchmarks/whole_lines.py --seconds 20 --out .

Every rank stores lines into the memory of every other one, as fast as it can and with all its multiprocessors, and
reads those of the others at the same time.  All words of a line carry the same number, which grows from line to line,
so a line that has two numbers was torn.  A probe can only find that the fact does not hold.  That it was not found to
fail is taken as its proof, and the file says how many lines were looked at.
"""
# mypy: ignore-errors

import argparse
import json
import pathlib
import sys
import time

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from iris_triton.collectives.packets.assembly import push_assembly, run_assembly
from iris_triton.collectives.packets.fabric import FACT, FORMAT, file_name

_BLOCK = 256  # packets of a program
_WARPS = 8
_MIN_LINES = 1_000_000


@triton.constexpr_function
def _look_assembly():
    """Load a packet once, and compare its words with those of the seven neighbours.

    Operands: 0 whether the line has two numbers; 1 the larger one; 2 address.  The loads of eight threads are one
    access, as in `poll_assembly`.
    """
    text = "{ .reg .b32 w<4>, lo, hi, t; .reg .pred p; ld.relaxed.sys.global.v4.b32 {w0,w1,w2,w3}, [$2];\n"
    for to, which in (("lo", "min"), ("hi", "max")):
        text += f"{which}.u32 {to}, w0, w1; {which}.u32 {to}, {to}, w2; {which}.u32 {to}, {to}, w3;\n"
        for step in (1, 2, 4):
            text += f"shfl.sync.bfly.b32 t, {to}, {step}, 0x1f, 0xffffffff; {which}.u32 {to}, {to}, t;\n"
    return text + "setp.ne.b32 p, lo, hi; selp.b32 $0, 1, 0, p; mov.b32 $1, hi; }"


@triton.jit
def hammer(peers, box, me, first, rounds, torn, fresh, N: tl.constexpr, BLOCK: tl.constexpr):
    """Store and look, `rounds` times; half of the programs do one, half the other.

    Args:
        peers: addresses of the other ranks' heaps and, last, of the own one.
        box: byte of the heap at which the lines begin.
        me, N: this rank, and number of ranks.
        first: number of the first round, larger than in all launches before.
        torn, fresh: int64[programs], looks that saw a torn line, and looks that saw a line for the first time.
        BLOCK: packets of a program.
    """
    tl.static_assert(is_cuda(), "the probe is for NVIDIA GPUs")
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    stretch = (tl.num_programs(0) // 2).to(tl.int64) * (BLOCK * 16)
    at = tl.cast(box, tl.int64) + (program // 2).to(tl.int64) * (BLOCK * 16) + lanes.to(tl.int64) * 16
    seen = lanes * 0
    bad = lanes * 0
    new = lanes * 0
    for i in range(rounds):
        if program % 2 == 0:
            word = lanes * 0 + (first + i)
            for k in tl.static_range(N - 1):
                operands = peers[k] + at + me * stretch, word, word, word, word, lanes * 0 + 1
                run_assembly(push_assembly("ll128"), operands, 1, 1, 5)
        else:
            for k in tl.static_range(N - 1):
                source = (me + 1 + k) % N
                broken, number = run_assembly(_look_assembly(), (peers[N - 1] + at + source * stretch,), 2, 1, 0)
                bad += broken
                new += (number != seen).to(tl.int32)
                seen = number
    tl.store(torn + program, tl.sum((bad * (lanes % 8 == 0)).to(tl.int64), axis=0))
    tl.store(fresh + program, tl.sum((new * (lanes % 8 == 0)).to(tl.int64), axis=0))


def run(ctx, seconds: float) -> tuple[int, int]:
    """Hammer for some seconds; returns how many looks of this rank saw a torn line, and how many a line that was new.

    Collective: every rank of the context calls it, an open Iris on NVIDIA GPUs with two ranks at least.
    """
    size, me = ctx.num_ranks, ctx.cur_rank
    programs = 2 * torch.cuda.get_device_properties(ctx.device).multi_processor_count
    box = ctx.zeros(size * (programs // 2) * _BLOCK * 16, dtype=torch.uint8)
    bases = ctx.get_heap_bases().tolist()
    torn, fresh = (torch.zeros(programs, dtype=torch.int64, device=ctx.device) for _ in range(2))
    peers = tuple(bases[(me + 1 + i) % size] for i in range(size))
    offset = box.data_ptr() - bases[me]
    first, rounds, broken, looked = 1, 2000, 0, 0
    ctx.barrier()
    end = time.monotonic() + seconds
    while ctx.broadcast(time.monotonic() < end, 0):
        hammer[(programs,)](peers, offset, me, first, rounds, torn, fresh, N=size, BLOCK=_BLOCK, num_warps=_WARPS)
        torch.cuda.synchronize(ctx.device)
        broken, looked, first = broken + int(torn.sum()), looked + int(fresh.sum()), first + rounds
    ctx.barrier()
    return broken, looked


def main(arguments: list[str] | None = None) -> int:
    """Probe, and write the file; 0 if lines are whole."""
    from iris_core import Iris

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to look")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the file; the user's cache by default")
    given = parser.parse_args(arguments)
    with Iris("1GiB", device="cuda") as ctx:
        if ctx.num_ranks < 2:
            print("the probe needs two ranks at least: start it with torchrun", file=sys.stderr)
            return 2
        broken, looked = run(ctx, given.seconds)
        counts = [ctx.broadcast((broken, looked), rank) for rank in range(ctx.num_ranks)]
        broken, looked = (sum(each[i] for each in counts) for i in range(2))
        holds = broken == 0 and looked >= _MIN_LINES
        if ctx.cur_rank == 0:
            device = torch.cuda.get_device_name(ctx.device)
            folder = given.out or pathlib.Path(ctx.settings.cache_dir) / "fabric"
            folder.mkdir(parents=True, exist_ok=True)
            found = {"holds": holds, "lines": looked, "torn": broken, "ranks": ctx.num_ranks, "seconds": given.seconds}
            content = {"format": FORMAT, "device": device, "facts": {FACT: found}}
            path = folder / file_name(device)
            path.write_text(json.dumps(content, indent=2) + "\n")
            print(f"{looked} lines seen, {broken} torn: whole lines {'hold' if holds else 'DO NOT HOLD'}; {path}")
        ctx.barrier()
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
