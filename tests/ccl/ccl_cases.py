"""Calls of collectives with everything that can vary, and what they must give: computed by torch on one process."""

import functools
import itertools
from dataclasses import dataclass, field, replace

import torch
from emulation import emulated

from iris_core.providers.parts import dense, part_of
from iris_core.testing.conformance import collective_jobs
from iris_core.testing.conformance.collective_jobs import usual
from iris_core.types import CollectiveRequest, DeviceTarget, DeviceType
from iris_triton.collectives import collectives
from iris_triton.collectives.nvls import Nvls
from iris_triton.collectives.packets.base import PacketCollective

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
OPS = (*REDUCING, "all_gather", "all_to_all", "broadcast", "gather", "scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
MOVED = ("bool", "float8_e4m3fn", "complex64", "complex128")
PLACES = (
    "heap", "ordinary", "skewed", "strided", "strided ordinary", "gaps", "transposed", "input only", "output only",
)  # fmt: skip
"""Where tensors lie: on the heap; off it; on the heap at another offset on each rank, aligned to elements only; with
gaps between elements, or rows; with columns one behind the other; only one of the two on the heap."""
ENCODINGS = ("ll", "ll128", "sentinel")
CHOSEN = tuple((op, None) for op in OPS)
SMALL = "64KiB"
"""A workspace in which few messages of packets go in one piece."""
USUAL = ("pull", "one_shot", "two_shot")
"""Algorithms that are chosen for calls that name none."""


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
    splits: str = ""  # "uneven", "one way" or "on device" for all_to_all
    layout: str = "torch"
    config: dict = field(default_factory=dict, hash=False)
    jobs = "jobs_ccl"

    def __str__(self):
        parts = [self.op, self.dtype, str(self.shape), self.place]
        parts += [self.reduction] * (self.op in REDUCING) + ["in place"] * self.in_place + [self.splits, self.layout]
        return " ".join(filter(None, [*parts, f"root {self.root}" * (self.op in ROOTED), str(self.config or "")]))


def reductions(dtype):
    common = ("sum", "product", "min", "max")
    if dtype in FLOATS:
        return (*common, "avg")
    return (*common, "band", "bor", "bxor") if dtype == "bool" else (*common, "band", "bor", "bxor", "avg")


@functools.cache
def registered():
    """All algorithms by operation and name; those of packets as they are emulated on the CPU."""
    return {(each.op, each.name): each for each in (*collectives(), *emulated())}


def kinds(family=""):
    """(operation, algorithm) of what is registered: chosen by the library, "portable", "nvls" or of an encoding."""
    if not family or family == "portable":
        portable = [key for key, each in registered().items() if not isinstance(each, (PacketCollective, Nvls))]
        return [key for key in portable if key[0] in OPS and key[1] not in USUAL] if family else CHOSEN
    return [key for key in registered() if key[1].split("_")[0] == family]


def of(kind, dtype="float32", config=None, **fields):
    """A call of an algorithm, or of what the library chooses."""
    named = {"algorithm": kind[1]} if kind[1] else {}
    return Case(kind[0], dtype, config=named | (config or {}), **fields)


def several(kind):
    """A launch in several programs, and in many blocks where there are some."""
    if kind[1] == "copy_engine":
        return {}
    if kind[1] and "block_size_m" not in registered()[kind].uses:
        return {"comm_sms": 3, "num_warps": 1}
    return {"comm_sms": 3, "block_size_m": 4, "block_size_n": 16}


def reducing_cases(each=None, known=CHOSEN):
    """Every kind that reduces with every dtype and reduction; with so many reductions each, in turn, if said."""
    reducing = [kind for kind in known if kind[0] in REDUCING]
    for number, (kind, dtype) in enumerate(itertools.product(reducing, (*FLOATS, *INTEGERS, "bool"))):
        options = reductions(dtype)
        for i in range(each or len(options)):
            yield of(kind, dtype, reduction=options[(number + i) % len(options)], shape=(5, 3))


def moving_cases(known=CHOSEN):
    for number, (kind, dtype) in enumerate(itertools.product(known, (*FLOATS, *INTEGERS, *MOVED))):
        if kind[0] not in REDUCING:
            yield of(kind, dtype, shape=(5, 16), place=("heap", "gaps", "ordinary")[number % 3])


def shape_cases(known=CHOSEN):
    """Odd, small, large and empty shapes; of packets every kind of tail: whole packets and lines, and a bit more."""
    large = 40_001 if known is CHOSEN else 10_007
    for kind, shape in itertools.product(known, ((0,), (1,), (3, 0, 2), (1003,), (2, 3, 5, 7), (large,))):
        yield of(kind, "bfloat16", shape=shape)
        yield of(kind, "int8", shape=shape, place="ordinary")
    tails = (2, 7, 8, 9, 15, 16, 17, 119, 120, 121, 128, 1003)
    for kind, count in itertools.product([kind for kind in known if kind[1]], tails):
        yield of(kind, "float16" if kind[1].startswith("sentinel") else "int8", shape=(count,))


def place_cases(known=CHOSEN):
    """Wherever tensors may lie, in one program and in several, in one piece and in many."""
    for kind, place in itertools.product(known, PLACES):
        yield of(kind, "float32" if kind[1] else "int32", place=place)
        yield of(kind, "bfloat16", shape=(9, 101), place=place, config=several(kind))


def way_cases(size, known=CHOSEN):
    """What is peculiar to an operation: roots, working in place, other shapes, layouts, and algorithms by name."""
    for kind in known:
        op = kind[0]
        yield from (of(kind, root=root) for root in range(size) if op in ROOTED)
        if op not in ("all_to_all", "broadcast"):
            for place in ("heap", "ordinary"):
                yield of(kind, in_place=True, place=place, root=size - 1)
            yield of(kind, "bfloat16", shape=(9, 301), in_place=True, root=1 % size, config=several(kind))
        if kind[1] and "columns" in registered()[kind].layouts:
            for dtype, shape in (("bfloat16", (9, 8)), ("complex128", (5, 3)), ("int8", (40, 24)), ("int8", (9, 5))):
                for place in ("heap", "ordinary"):  # runs of whole vectors, and elements one by one
                    yield of(kind, dtype, layout="columns", shape=shape, place=place)
        if op in ("all_gather", "reduce_scatter", "gather", "scatter"):
            yield of(kind, stacked=True)
    if known is not CHOSEN:
        return
    for place in ("heap", "ordinary", "strided"):
        yield Case("all_to_all", splits="uneven", shape=(40, 3), place=place)
        yield Case("all_to_all", splits="one way", shape=(5, 3), place=place)
        yield Case("all_to_all", splits="on device", shape=(40, 3), place=place)
        yield Case("all_to_all", splits="uneven", shape=(2000, 5), dtype="int8", place=place)
        yield Case("all_to_all", layout="columns", shape=(9, 5), place=place)
    for algorithm, place in itertools.product(("one_shot", "two_shot"), PLACES):
        yield Case("all_reduce", shape=(9, 301), place=place, config={"algorithm": algorithm})
        yield Case("all_reduce", "bfloat16", shape=(3,), place=place, config={"algorithm": algorithm})
        yield Case(
            "all_reduce", "float16", shape=(9, 301), place=place, in_place=place not in ("input only", "output only"),
            config={"algorithm": algorithm, "comm_sms": 2, "block_size_n": 8},
        )  # fmt: skip


def piece_cases(known=CHOSEN):
    """Messages that are larger than a small workspace."""
    for number, kind in enumerate(known):
        if not kind[1] or kind[1] == "copy_engine" or "block_size_m" in registered()[kind].uses:
            dtype, place = (("float32", "ordinary"), ("bfloat16", "heap"), ("int8", "output only"))[number % 3]
            yield of(kind, shape=(3, 701), place="ordinary")
            yield of(kind, dtype, shape=(3, 701), place=place)
            continue
        for count, programs in ((4001, 1), (4096, 3), (9001, 2)):
            yield of(kind, "float16", shape=(count,), config={"num_warps": 4, "comm_sms": programs})
        yield of(kind, shape=(5003,), in_place=kind[0] == "all_reduce", config={"num_warps": 4})
    if known is CHOSEN:
        for place in ("input only", "output only"):
            yield Case("all_reduce", "int8", shape=(5000,), place=place)
        yield Case("all_reduce", shape=(3, 701), place="ordinary", config={"algorithm": "two_shot"})
        yield Case("all_to_all", splits="uneven", shape=(900, 3), place="ordinary")
        yield Case("all_to_all", "complex128", splits="on device", shape=(900, 3), place="ordinary")


def sequence_cases(family):
    """Calls of very different sizes, in one piece and in several, in one program and in several."""
    for kind in kinds(family):
        for shape, programs in (((3,), 1), ((1003,), 4), ((5003,), 2)):
            yield of(kind, shape=shape, config={"num_warps": 4, "comm_sms": programs})


def data(case, rank, size, turn=0):
    """A rank's input, contiguous and on the CPU: small integers, of which all results are exact in any order."""
    generator, dtype = torch.Generator().manual_seed(97 * turn + rank), getattr(torch, case.dtype)
    if dtype.is_floating_point or dtype.is_complex or dtype.is_signed:
        low, high = (1, 3) if case.reduction == "product" else (-4, 5)
    else:
        low, high = 0, 2 if case.dtype == "bool" else 7
    return torch.randint(low, high, input_shape(case, rank, size), generator=generator).to(torch.float32).to(dtype)


def row_splits(case, size):
    """How many rows each rank has for each other: a matrix whose rows add up to different numbers, with zeros."""
    rows = case.shape[0]
    if case.splits == "one way":  # from the last rank to all, and nothing from the others
        return [[rows * (i == size - 1)] * size for i in range(size)]
    return [[(3 * i + 5 * j) % 4 * rows // 16 for j in range(size)] for i in range(size)]


def input_shape(case, rank, size):
    if case.splits:
        return (sum(row_splits(case, size)[rank]), *case.shape[1:])
    if case.layout == "columns":
        return (case.shape[0], case.shape[1] * size)
    return whole(case, size) if case.op in ("reduce_scatter", "all_to_all", "scatter") else case.shape


def output_shape(case, rank, size):
    if case.splits:
        return (sum(row[rank] for row in row_splits(case, size)), *case.shape[1:])
    if case.layout == "columns":
        return (case.shape[0], case.shape[1] * size)
    return whole(case, size) if case.op in ("all_gather", "all_to_all", "gather") else case.shape


def whole(case, size):
    """Shape of one part for each member."""
    return (size, *case.shape) if case.stacked else (size * case.shape[0], *case.shape[1:])


def expected(case, rank, inputs):
    size = len(inputs)
    if case.layout == "columns":
        return torch.cat([each.chunk(size, dim=1)[rank] for each in inputs], dim=1)
    if case.splits:
        splits = row_splits(case, size)
        return torch.cat([each.split(split)[rank] for each, split in zip(inputs, splits, strict=True)])
    inputs = [torch.atleast_1d(each) for each in inputs]
    found = collective_jobs.expected(usual(case.op, reduction=case.reduction, root=case.root), inputs)[rank]
    return found.to(inputs[0].dtype).reshape(output_shape(case, rank, size))


def request(case, size, **changes):
    """What an algorithm is asked on rank 0, as far as `supports` may look."""
    step, is_dense = 2 if "strided" in case.place else 1, case.place in PLACES[:3] + PLACES[-2:]
    sides = []
    for shape, elsewhere in ((input_shape(case, 0, size), "output only"), (output_shape(case, 0, size), "input only")):
        stride = tuple(step * each for each in dense(shape))
        stride = stride[::-1] if case.place == "transposed" and len(shape) == 2 else stride
        stride = (*(2 * each for each in stride[:-1]), 1) if case.place == "gaps" else stride
        sides.append((shape, stride, is_dense and case.place not in ("ordinary", elsewhere)))
    options = {"layout": case.layout, "uneven": bool(case.splits), "in_place": case.in_place, "root": case.root}
    options |= {"config": {name: value for name, value in case.config.items() if name != "algorithm"}, "aligned": True}
    options |= {"reduction": case.reduction} if case.op in REDUCING else {}
    of = CollectiveRequest(case.op, (), case.dtype, 0, 0, size, DeviceTarget(DeviceType.CPU), members=range(size))
    return replace(part_of(of, case.op, *sides, **options), **{"nbytes": 4096, **changes})


def served(cases, size):
    """Those of them that their algorithms serve."""

    def is_served(case):
        name = case.config.get("algorithm")
        return name is None or registered()[case.op, name].supports(request(case, size))

    return list(filter(is_served, cases))
