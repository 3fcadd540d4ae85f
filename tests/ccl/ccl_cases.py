"""Calls of collectives with everything that can vary, and what they must give: computed by torch on one process.

Data is made of small integers, so that every result is exact in every dtype, in whatever order it is added up.
"""

import itertools
import math
from dataclasses import dataclass, field, replace

import torch

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
OPS = (*REDUCING, "all_gather", "all_to_all", "broadcast", "gather", "scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
PLACES = ("heap", "ordinary", "skewed", "strided", "strided ordinary", "transposed", "input only", "output only")
"""Where tensors lie: on the heap; off it; on the heap at another offset on each rank, aligned to elements only; with
gaps between elements; with columns one behind the other; only one of the two on the heap."""


@dataclass(frozen=True)
class Case:
    """One call."""

    op: str
    dtype: str = "float32"
    reduction: str = "sum"
    shape: tuple = (7, 33)
    place: str = "heap"
    root: int = 0
    in_place: bool = False
    stacked: bool = False  # (size, M, ...) instead of (size * M, ...)
    splits: str = ""  # "uneven" or "one way" for all_to_all
    layout: str = "torch"
    config: dict = field(default_factory=dict, hash=False)

    def __str__(self):
        parts = [self.op, self.dtype, str(self.shape), self.place]
        parts += [self.reduction] * (self.op in REDUCING) + ["in place"] * self.in_place + [self.splits, self.layout]
        return " ".join(filter(None, [*parts, f"root {self.root}" * (self.op in ROOTED), str(self.config or "")]))


def reductions(dtype):
    """Reductions that are defined for a dtype."""
    common = ("sum", "product", "min", "max")
    if dtype in FLOATS:
        return (*common, "avg")
    return (*common, "band", "bor", "bxor") if dtype == "bool" else (*common, "band", "bor", "bxor", "avg")


def reducing_cases(each=None):
    """Every operation that reduces with every dtype and reduction; with so many reductions each, in turn, if said."""
    for number, (op, dtype) in enumerate(itertools.product(REDUCING, (*FLOATS, *INTEGERS, "bool"))):
        known = reductions(dtype)
        for i in range(each or len(known)):
            yield Case(op, dtype, known[(number + i) % len(known)], shape=(5, 3))


def reducing_pairs():
    """Every dtype with every reduction, by the operations in turn."""
    for number, dtype in enumerate((*FLOATS, *INTEGERS, "bool")):
        for i, reduction in enumerate(reductions(dtype)):
            yield Case(REDUCING[(number + i) % len(REDUCING)], dtype, reduction, shape=(5, 3))


def moving_cases():
    """Every operation that moves with every dtype."""
    others = ("bool", "float8_e4m3fn", "complex64", "complex128")
    for op, dtype in itertools.product(OPS, (*FLOATS, *INTEGERS, *others)):
        if op not in REDUCING:
            yield Case(op, dtype, shape=(5, 3))


def shape_cases():
    """Every operation with odd, small, large and empty shapes."""
    for op, shape in itertools.product(OPS, ((0,), (1,), (3, 0, 2), (1003,), (2, 3, 5, 7), (40_001,))):
        yield Case(op, "bfloat16", shape=shape)
        yield Case(op, "int8", shape=shape, place="ordinary")


def place_cases():
    """Every operation wherever tensors may lie, in one program and in several, in one piece and in many."""
    several = {"comm_sms": 3, "block_size_m": 4, "block_size_n": 16}
    for op, place in itertools.product(OPS, PLACES):
        yield Case(op, "int32", place=place)
        yield Case(op, "bfloat16", shape=(9, 101), place=place, config=several)


def way_cases(size):
    """What is peculiar to an operation: roots, working in place, other shapes, layouts, and algorithms by name."""
    for op, root in itertools.product(ROOTED, range(size)):
        yield Case(op, root=root)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "reduce", "gather", "scatter"):
        for place in ("heap", "ordinary"):
            yield Case(op, in_place=True, place=place, root=size - 1)
    for op in ("all_gather", "reduce_scatter", "gather", "scatter"):
        yield Case(op, stacked=True)
    for place in ("heap", "ordinary", "strided"):
        yield Case("all_to_all", splits="uneven", shape=(40, 3), place=place)
        yield Case("all_to_all", splits="one way", shape=(5, 3), place=place)
        yield Case("all_to_all", splits="uneven", shape=(2000, 5), dtype="int8", place=place)
        yield Case("all_to_all", layout="columns", shape=(9, 5), place=place)
    for algorithm, place in itertools.product(("one_shot", "two_shot"), PLACES):
        yield Case("all_reduce", shape=(9, 301), place=place, config={"algorithm": algorithm})
        yield Case("all_reduce", "bfloat16", shape=(3,), place=place, config={"algorithm": algorithm})
        yield Case(
            "all_reduce", "float16", shape=(9, 301), place=place, in_place=place not in ("input only", "output only"),
            config={"algorithm": algorithm, "comm_sms": 2, "block_size_n": 8},
        )  # fmt: skip


def data(case, rank, size, turn=0):
    """A rank's input, contiguous and on the CPU."""
    generator = torch.Generator().manual_seed(97 * turn + rank)
    dtype = getattr(torch, case.dtype)
    shape = input_shape(case, rank, size)
    if case.dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    low, high = (1, 3) if case.reduction == "product" else (-4, 5)
    if dtype.is_floating_point or dtype.is_complex or dtype.is_signed:
        return torch.randint(low, high, shape, generator=generator).to(torch.float32).to(dtype)
    return torch.randint(0, 7, shape, generator=generator).to(dtype)


def row_splits(case, size):
    """How many rows each rank has for each other: a matrix whose rows add up to different numbers, with zeros."""
    rows = case.shape[0]
    if case.splits == "one way":  # from the last rank to all, and nothing from the others
        return [[rows * (i == size - 1)] * size for i in range(size)]
    return [[(3 * i + 5 * j) % 4 * rows // 16 for j in range(size)] for i in range(size)]


def input_shape(case, rank, size):
    """Shape of a rank's input."""
    if case.splits:
        return (sum(row_splits(case, size)[rank]), *case.shape[1:])
    if case.layout == "columns":
        return (case.shape[0], case.shape[1] * size)
    return whole(case, size) if case.op in ("reduce_scatter", "all_to_all", "scatter") else case.shape


def output_shape(case, rank, size):
    """Shape of a rank's output."""
    if case.splits:
        return (sum(row[rank] for row in row_splits(case, size)), *case.shape[1:])
    if case.layout == "columns":
        return (case.shape[0], case.shape[1] * size)
    return whole(case, size) if case.op in ("all_gather", "all_to_all", "gather") else case.shape


def whole(case, size):
    """Shape of one part for each member."""
    return (size, *case.shape) if case.stacked else (size * case.shape[0], *case.shape[1:])


def expected(case, rank, inputs):
    """What a rank gets, given the inputs of all."""
    size = len(inputs)
    if case.op in REDUCING:
        total = reduced(case, inputs)
        return total.reshape(size, *case.shape)[rank] if case.op == "reduce_scatter" else total
    if case.layout == "columns":
        return torch.cat([each.chunk(size, dim=1)[rank] for each in inputs], dim=1)
    if case.splits:
        splits = row_splits(case, size)
        return torch.cat([each.split(split)[rank] for each, split in zip(inputs, splits, strict=True)])
    if case.op == "all_to_all":
        return torch.cat([each.chunk(size)[rank] for each in inputs]) if math.prod(case.shape) else inputs[0]
    if case.op == "scatter":
        return inputs[case.root].reshape(size, *case.shape)[rank]
    return inputs[case.root] if case.op == "broadcast" else torch.stack(inputs).reshape(whole(case, size))


def reduced(case, inputs):
    """The reduction of all inputs, in the dtype."""
    dtype, op = inputs[0].dtype, case.reduction
    if case.dtype == "bool":
        op = {"sum": "max", "product": "min", "band": "min", "bor": "max"}.get(op, op)
        stacked = torch.stack(inputs).to(torch.int64)
    else:
        stacked = torch.stack(inputs).to(torch.float64 if dtype.is_floating_point else torch.int64)
    if op in ("band", "bor", "bxor"):
        result = stacked[0]
        for each in stacked[1:]:
            result = {"band": result & each, "bor": result | each, "bxor": result ^ each}[op]
        return result.to(dtype)
    if op == "avg":
        total = stacked.sum(0).to(dtype)  # integers wrap around before they are divided
        if dtype.is_floating_point:
            return (stacked.sum(0).to(torch.float32 if dtype.itemsize < 4 else dtype) / len(inputs)).to(dtype)
        return torch.div(total, len(inputs), rounding_mode="trunc")
    return {"sum": stacked.sum(0), "product": stacked.prod(0), "min": stacked.amin(0), "max": stacked.amax(0)}[op].to(
        dtype
    )


def with_config(cases, **config):
    """The same cases with fields of a config."""
    return [replace(case, config=case.config | config) for case in cases]
