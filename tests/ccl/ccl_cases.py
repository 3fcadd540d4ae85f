"""Calls of collectives with everything that can vary, and what they must give: computed by torch on one process."""

import functools
import itertools
import math
from dataclasses import dataclass, field, replace

import torch
from emulation import emulated

from iris_core.dispatch.config import Config
from iris_core.dispatch.requests import REDUCING, ROOTED
from iris_core.providers.parts import PARTED_IN, PARTED_OUT, dense
from iris_core.testing.conformance import collective_jobs
from iris_core.testing.conformance.collective_jobs import BITWISE, DTYPES
from iris_core.types import REDUCIBLE, DeviceTarget, DeviceType
from iris_triton.collectives import collectives
from iris_triton.collectives.nvls import Nvls
from iris_triton.collectives.packets.base import PacketCollective

OPS = (*REDUCING, "all_gather", "all_to_all", "broadcast", "gather", "scatter")
PLACES = (*collective_jobs.PLACES, "strided ordinary", "gaps", "transposed", "input only", "output only")
"""Also with gaps between elements off the heap, or between rows; with columns one behind the other; only one of the
two on the heap."""
ENCODINGS = ("ll", "ll128", "sentinel")
CHOSEN = tuple((op, None) for op in OPS)
SMALL = "64KiB"
"""A workspace in which few messages of packets go in one piece."""
USUAL = ("pull", "one_shot", "two_shot")
"""Algorithms that are chosen for calls that name none."""


@dataclass(frozen=True)
class Case(collective_jobs.Case):
    """One call."""

    shape: tuple = (7, 33)
    stacked: bool = False  # (size, M, ...) instead of (size * M, ...)
    splits: str = ""  # "uneven", "one way" or "on device" for all_to_all
    layout: str = "torch"
    config: dict = field(default_factory=dict, hash=False)
    jobs, exact = "jobs_ccl", True

    def rows(self, rank, size):
        """How many rows a rank has for each other, and gets from each: different sums, with zeros."""
        rows = self.shape[0]
        matrix = [[(3 * i + 5 * j) % 4 * rows // 16 for j in range(size)] for i in range(size)]
        if self.splits == "one way":  # from the last rank to all, and nothing from the others
            matrix = [[rows * (i == size - 1)] * size for i in range(size)]
        return matrix[rank], [row[rank] for row in matrix]

    def shapes(self, rank, size):
        """Of the input and the output."""
        if self.splits:
            return [(sum(each), *self.shape[1:]) for each in self.rows(rank, size)]
        if self.layout == "columns":
            return ((self.shape[0], self.shape[1] * size),) * 2
        whole = (size, *self.shape) if self.stacked else (size * math.prod(self.shape[:1]), *self.shape[1:])
        return tuple(whole if self.op in ops else self.shape for ops in (PARTED_IN, PARTED_OUT))

    def strides(self, shape):
        if self.place == "transposed" and len(shape) == 2:
            return 1, shape[0]
        if self.place == "gaps":
            return (*(2 * each for each in dense(shape)[:-1]), 1)
        return tuple((2 if "strided" in self.place else 1) * each for each in dense(shape))

    def sides(self, rank, size):
        off_heap = [{"ordinary", "strided ordinary", each} for each in ("output only", "input only")]
        shapes = self.shapes(rank, size)
        return [(x, self.strides(x), self.place not in off) for x, off in zip(shapes, off_heap, strict=True)]

    def expected(self, inputs, wide=None):
        size = len(inputs)
        if self.layout == "columns":
            parts = [each.chunk(size, 1) for each in inputs]
        elif self.splits:
            parts = [each.split(self.rows(rank, size)[0]) for rank, each in enumerate(inputs)]
        else:
            return super().expected(list(map(torch.atleast_1d, inputs)), wide)
        return [torch.cat(each, int(self.layout == "columns")) for each in zip(*parts, strict=True)]

    def request(self, rank, members, target, **options):
        options |= {"layout": self.layout, "uneven": bool(self.splits), "aligned": True}
        options["config"] = Config(**self.config).given(self.op)
        return super().request(rank, members, target, **options)


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
    for number, (kind, dtype) in enumerate(itertools.product(reducing, REDUCIBLE)):
        options = ["sum", "product", "min", "max"]
        options += BITWISE * (not getattr(torch, dtype).is_floating_point) + ("avg",) * (dtype != "bool")
        for i in range(each or len(options)):
            yield of(kind, dtype, reduction=options[(number + i) % len(options)], shape=(5, 3))


def moving_cases(known=CHOSEN):
    for number, (kind, dtype) in enumerate(itertools.product(known, (*DTYPES, "complex128"))):
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
        if kind[1] == "copy_engine":
            yield of(kind, in_place=op == "all_gather", config={"same_place": True})
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


def request(case, size, **changes):
    """What an algorithm is asked on rank 0, as far as `supports` may look."""
    return replace(case.request(0, range(size), DeviceTarget(DeviceType.CPU)), **changes)


def served(cases, size):
    """Those of them that their algorithms serve."""

    def is_served(case):
        name = case.config.get("algorithm")
        return name is None or registered()[case.op, name].supports(request(case, size))

    return list(filter(is_served, cases))
