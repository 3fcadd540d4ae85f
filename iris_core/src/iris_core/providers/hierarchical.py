"""Collectives between nodes, level by level: kernels within each node, torch.distributed along the rails.

A rail connects the ranks that have the same place on their nodes.  all_reduce is a reduce_scatter in the node, an
all_reduce along the rail and an all_gather in the node, so that each byte crosses the network once for each node (Jia
et al., Highly scalable deep learning training system with mixed-precision, 2018); the others are made in the same way
(Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005).  It goes in
chunks: while the rail carries one, the kernels of the node work on the next one and on the one before.  An all_to_all
has nothing to gain from levels: see `straight`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from iris_core.device.launch_order import Begun
from iris_core.dispatch.requests import REDUCING, nodes_of
from iris_core.dispatch.team import Host
from iris_core.providers.model import between_nodes_s, everywhere
from iris_core.providers.parts import PARTED_IN, PARTED_OUT, Composed, Side, Staged, dense, part_of, scratch_of, staged
from iris_core.types import CollectiveRequest
from iris_core.world.scaling import CHUNKS

STEPS = {
    "all_reduce": ("reduce_scatter", "all_reduce", "all_gather"),
    "reduce": ("reduce_scatter", "reduce", "gather"),
    "broadcast": ("scatter", "broadcast", "all_gather"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter", ""),
    "scatter": ("scatter", "scatter", ""),
    "all_gather": ("", "all_gather", "all_gather"),
    "gather": ("", "gather", "gather"),
}
"""Each operation's steps: in the node, along the rail, and in the node again."""

_DIVIDED = ("all_reduce", "reduce", "broadcast")
"""Operations on whole tensors, which the ranks of a node divide among them; those of the others have parts."""

_ROOTED_IN_NODE = ("scatter", "gather")
_LEAST_NBYTES, _MOST_NBYTES = 1 << 20, 32 << 20
"""Of what a rank sends along its rail in a chunk: the network's latency is that of nearly as many bytes as the first;
the second bounds the memory between the steps.  Where a config says how many chunks, neither counts."""

_TRIED, _LEAST_TRIED_NBYTES = (1, 2, 4, 8), 256 << 10
"""Numbers of chunks that `iris tune` and exhaustive first calls measure, and what a chunk has then at least."""

_LANES = 16  # elements: chunks begin at multiples of 16 bytes


class Grid(NamedTuple):
    """Members by node: `rows[node][place]` is a number in the group; this rank is at (`node`, `place`)."""

    rows: tuple[tuple[int, ...], ...]
    node: int
    place: int

    @property
    def rail(self) -> tuple[int, ...]:
        """The members along this rank's rail."""
        return tuple(row[self.place] for row in self.rows)

    def at(self, member: int) -> tuple[int, int]:
        """Node and place of a member."""
        return next((node, row.index(member)) for node, row in enumerate(self.rows) if member in row)


def grid_of(request: CollectiveRequest) -> Grid | None:
    """Return the members as a grid, in the order of their ranks; None if they are none.

    A grid has equally many on each of several nodes, and several on each.
    """
    by_node: dict[int, list[int]] = {node: [] for node in nodes_of(request)}
    for member in sorted(range(request.group_size), key=request.members.__getitem__):
        by_node[request.nodes[member]].append(member)
    rows = tuple(map(tuple, by_node.values()))
    if len(rows) < 2 or len({len(row) for row in rows}) > 1 or len(rows[0]) < 2:
        return None
    return Grid(rows, *Grid(rows, 0, 0).at(request.rank))


@dataclass(slots=True)
class _Chunk:
    begin: int  # its first element: of each part, or of the share of a place
    length: int
    count: int  # elements of the tensor that are divided; fewer than there is space for in the last chunk
    steps: tuple[Any, Any, Any]  # what is bound, None for nothing
    space: tuple[torch.Tensor | None, torch.Tensor | None]  # for the input and output of a chunk that is filled up


@dataclass(slots=True)
class _Plan:
    grid: Grid
    chunks: list[_Chunk]
    between: tuple[torch.Tensor, torch.Tensor]  # the steps, of two chunks in turn
    strides: tuple[int, int]  # parts from node to node, and from place to place
    direct: bool  # the steps of an all_reduce meet in the output
    inp: Staged = field(default_factory=Staged)
    out: Staged = field(default_factory=Staged)
    turn: int = 0
    pending: Begun | None = None
    latest: Any = None  # the steps of what is pending


class Hierarchical(Composed):
    """One collective by levels: 16-bit floats are rounded once in each node, and along the rail as torch does it."""

    name = "hierarchical"
    info = everywhere("hierarchical", "collectives within nodes and along rails, in chunks")
    always_measured = True
    fields = ("chunks",)

    def _problem(self, request: CollectiveRequest) -> str:
        if grid_of(request) is None:
            return "the group has not equally many ranks, and two at least, on each node"
        is_whole = not getattr(torch, request.dtype).is_floating_point
        is_average = request.options.get("reduction") == "avg"
        return "an average of integers is rounded once, and not in each node" if is_average and is_whole else ""

    def cost(self, request: CollectiveRequest) -> float:
        return between_nodes_s(request, flat=False)

    def tunings(self, request: CollectiveRequest) -> list[dict[str, int]]:
        """Return the configs to measure, the default first: other numbers of chunks, 1 of them without an overlap."""
        grid = grid_of(request)
        if grid is None:
            return [{}]
        nodes = len(grid.rows)
        _, share, width, length = _sizes(request, nodes, request.group_size // nodes)
        nbytes, own = share * width * getattr(torch, request.dtype).itemsize, -(-share // max(1, length))
        found = [n for n in _TRIED if n != own and n * _LEAST_TRIED_NBYTES <= nbytes]
        return [{}, *({"chunks": n} for n in found)]

    # -- preparing ----------------------------------------------------------------------------------------------------
    def prepare(self, request: CollectiveRequest, host: Host) -> _Plan:
        """Divide the call into chunks, and bind their steps."""
        grid, options, op = grid_of(request), request.options, self.op
        assert grid is not None
        nodes, places = len(grid.rows), len(grid.rows[0])
        divided, has_in, has_out = op in _DIVIDED, "in_stride" in options, "out_shape" in options
        count, share, width, length = _sizes(request, nodes, places)
        linear = strides_of(grid)
        plan = _Plan(
            grid=grid,
            chunks=[],
            between=tuple(scratch_of(host, f"{op} {n}", length * width, request.dtype) for n in range(2)),  # type: ignore[arg-type]
            strides=linear or (places, 1),
            direct=op == "all_reduce" and request.direct_out,
        )
        order = None if linear else [member for row in grid.rows for member in row]
        if has_in:
            sides = request.shape, options["in_stride"], order if op in PARTED_IN else None
            plan.inp = staged(host, f"{op} inp", request.dtype, *sides)
        if has_out:
            sides = options["out_shape"], options["out_stride"], order if op in PARTED_OUT else None
            plan.out = staged(host, f"{op} out", request.dtype, *sides)
        bound: dict[tuple[int, bool], tuple[Any, Any, Any]] = {}
        for begin in range(0, share, length):
            own = min(length, share - begin)
            there = min(own * places, count - begin * places) if divided else own
            is_full = not divided or there == own * places
            if (own, is_full) not in bound:
                bound[own, is_full] = self._bind(request, host, plan, own, share, is_full)
            given, taken = (
                None if is_full or not has else scratch_of(host, f"{op} {what} filled up", own * places, request.dtype)
                for what, has in (("inp", has_in), ("out", has_out))
            )
            plan.chunks.append(_Chunk(begin, own, there, bound[own, is_full], (given, taken)))
        return plan

    def _bind(
        self, request: CollectiveRequest, host: Host, plan: _Plan, length: int, share: int, is_full: bool
    ) -> tuple[Any, Any, Any]:
        """Bind the steps of a chunk, each with its members."""
        grid, op, options = plan.grid, self.op, request.options
        nodes, places = len(grid.rows), len(grid.rows[0])
        root = grid.at(options["root"]) if "root" in options else (-1, -1)
        in_roots_node, on_roots_rail = grid.node == root[0], grid.place == root[1]
        is_root = in_roots_node and on_roots_rail
        if op in _DIVIDED:
            one: Side = (length,), (1,), plan.direct and is_full
            shape = places, length
            # what only some members have, or have alike, is nothing that the others know
            direct_in = request.direct_in and is_full and op != "broadcast"
            all_in: Side = shape, dense(shape), direct_in
            all_out: Side = shape, dense(shape), request.direct_out and is_full and op != "broadcast"
            rail_in = rail_out = one
        else:
            per_node, per_place = (stride * share for stride in plan.strides)
            wide = places, nodes, length
            apart: Side = wide, (per_place, per_node, 1), False
            all_in = all_out = apart
            part: Side = (length,), (1,), False
            one = (nodes, length), (length, 1), False
            rail_in, rail_out = (part, one) if op in PARTED_OUT else (one, part)

        first, middle, last = STEPS[op]
        more = {"reduction": options["reduction"]} if "reduction" in options else {}
        meets = plan.direct and is_full
        how = {
            "reduce_scatter": {**more, "in_place": meets and options["in_place"]},
            "all_gather": {"in_place": meets},
            **{step: {"root": root[1]} for step in _ROOTED_IN_NODE},
        }

        def in_node(step: str, inp: Side | None, out: Side | None) -> Any:
            if not step:
                return None
            wanted = None
            if step not in _ROOTED_IN_NODE or in_roots_node:
                given = inp if step != "scatter" or is_root else None
                taken = out if step != "gather" or is_root else None
                wanted = part_of(request, step, given, taken, grid.rows[grid.node], **how.get(step, {}))
            return host.collective(wanted)

        bound_first = in_node(first, all_in, one)
        given = None if middle in ("broadcast", "scatter") and not in_roots_node else rail_in
        taken = None if middle in ("reduce", "gather") and not in_roots_node else rail_out
        on_rail = {"root": root[0]} if "root" in options else {}
        on_rail |= {**(more if middle in REDUCING else {}), "in_place": rail_in is rail_out}
        rail = host.collective(part_of(request, middle, given, taken, grid.rail, **on_rail))
        return bound_first, rail, in_node(last, one, all_out)

    # -- launching ----------------------------------------------------------------------------------------------------
    def begin(self, plan: _Plan, out: Any, inp: Any) -> Begun:
        """Launch all but the end of the last chunk, and return a handle for that.

        The end of a call that was begun before comes while this one's first chunk is on the rail.
        """
        if plan.pending is not None and (plan.inp.buffer is not None or plan.out.buffer is not None):
            plan.pending.wait()
        try:
            with torch.no_grad():
                given = None if inp is None else plan.inp.fill(inp)
                taken = None if out is None else plan.out.flat(out)
                for chunk in plan.chunks:
                    before = plan.pending
                    if before is not None and chunk.steps is not plan.latest:  # other plans, the same buffers
                        before.wait()
                    plan.latest = chunk.steps
                    plan.pending = self._begin_chunk(plan, chunk, taken, given, out)
                    if before is not None:
                        before.wait()
        except BaseException:
            plan.pending = None
            raise
        begun = plan.pending
        assert begun is not None
        return begun

    def _begin_chunk(self, plan: _Plan, chunk: _Chunk, out: Any, inp: Any, whole: Any) -> Begun:
        """Do the first step of a chunk, and begin the second one; `out` and `inp` are flat, `whole` is the output."""
        op, grid, length = self.op, plan.grid, chunk.length
        nodes, places = len(grid.rows), len(grid.rows[0])
        first, rail, _ = chunk.steps
        between = plan.between[plan.turn]
        plan.turn ^= 1
        all_in: Any = self._all_of(plan, chunk, inp, 0) if op in _DIVIDED or op in PARTED_IN else None
        all_out: Any = self._all_of(plan, chunk, out, 1) if op in _DIVIDED or op in PARTED_OUT else None
        if op in _DIVIDED:
            one = all_out[grid.place] if plan.direct and chunk.space[1] is None else between[:length]
            if chunk.space[0] is not None and inp is not None:
                chunk.space[0][: chunk.count].copy_(inp[chunk.begin * places :])
                chunk.space[0][chunk.count :].zero_()
            rail_in = rail_out = one
        else:
            one = between[: nodes * length].view(nodes, length)
            mine = inp if op in PARTED_OUT else out
            part = None if mine is None else mine[chunk.begin : chunk.begin + length]
            rail_in, rail_out = (part, one) if op in PARTED_OUT else (one, part)
        if first is not None:
            first.launch(one, all_in)
        has = rail.request.options
        work = rail.begin(rail_out if "out_shape" in has else None, rail_in if "in_stride" in has else None)
        return Begun(partial(self._end_chunk, plan, chunk, work, one, all_out, out, whole))

    def _all_of(self, plan: _Plan, chunk: _Chunk, flat: torch.Tensor | None, which: int) -> Any:
        """Return the chunk of what has elements for all: (places, length) or (places, nodes, length), or None."""
        if flat is None:
            return None
        nodes, places, length = len(plan.grid.rows), len(plan.grid.rows[0]), chunk.length
        if self.op in _DIVIDED:
            space, begin = chunk.space[which], chunk.begin * places
            return (flat[begin : begin + places * length] if space is None else space).view(places, length)
        per_node, per_place = (stride * (flat.numel() // (nodes * places)) for stride in plan.strides)
        return flat.as_strided((places, nodes, length), (per_place, per_node, 1), flat.storage_offset() + chunk.begin)

    def _end_chunk(self, plan: _Plan, chunk: _Chunk, work: Any, one: Any, all_out: Any, out: Any, whole: Any) -> None:
        """Wait for the rail, and do the last step of a chunk; after the last chunk, complete the output."""
        with torch.no_grad():
            work.wait()
            if (last := chunk.steps[2]) is not None:
                last.launch(all_out, one)
            if chunk.space[1] is not None and out is not None:
                out[chunk.begin * len(plan.grid.rows[0]) :].copy_(chunk.space[1][: chunk.count])
            if chunk is plan.chunks[-1] and whole is not None:
                plan.out.drain(whole)


def _sizes(request: CollectiveRequest, nodes: int, places: int) -> tuple[int, int, int, int]:
    """Return elements of the tensor, or of a part; of what a rank sends along its rail, and by how many; of a chunk."""
    op, size = request.op, nodes * places
    has_all = op == "reduce_scatter" or (op == "scatter" and request.rank == request.options["root"])
    count = math.prod(request.shape) // (size if has_all else 1)
    share = -(-count // places) if op in _DIVIDED else count
    width = 1 if op in _DIVIDED else nodes  # what a rank has between two steps
    nbytes = share * width * getattr(torch, request.dtype).itemsize
    usual = max(1, min(CHUNKS, nbytes // _LEAST_NBYTES), -(-nbytes // _MOST_NBYTES))
    pieces = request.options.get("config", {}).get("chunks", usual)
    return count, share, width, min(share, -(-share // pieces // _LANES) * _LANES) if pieces > 1 else share


def strides_of(grid: Grid) -> tuple[int, int] | None:
    """Return by how much the members' numbers grow from node to node and from place to place; None if unevenly."""
    nodes, places = len(grid.rows), len(grid.rows[0])
    for per_node, per_place in ((places, 1), (1, nodes)):
        if all(
            member == n * per_node + at * per_place for n, row in enumerate(grid.rows) for at, member in enumerate(row)
        ):
            return per_node, per_place
    return None
