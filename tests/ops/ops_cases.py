"""Calls of ctx.ops with everything that can vary, and what they must give: computed by torch in float64."""

import itertools
import math
from dataclasses import dataclass, field

import torch

OPS = ("matmul_all_reduce", "all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter")
FUSED = dict(zip(OPS, ("two_shot", "fetch", "push", "push"), strict=True))
PLACES = ("heap", "ordinary", "transposed", "gaps", "skewed")
"""Where tensors lie: on the heap; off it; with columns one behind the other; with gaps between rows; aligned to
elements only."""

UNTOUCHED = 77.0
"""In every element of an output before the call."""

SEVERAL = {"num_sms": 3, "block_size_m": 16, "block_size_n": 16, "block_size_k": 32}
"""Several programs, and several tiles for each, even of small matrices."""


@dataclass(frozen=True)
class Case:
    """One call.  `shape` is that of A and B of one rank, so far as ranks divide nothing."""

    op: str
    algorithm: str | None = None
    shape: tuple = (24, 20, 40)  # m, n, k
    dtype: str = "float32"
    out_dtype: str = ""
    place: str = "heap"
    out_place: str = "heap"
    bias: str = ""  # "columns" or "rows"
    dim: int | None = None
    layout: str = "torch"
    scales: str = ""  # "rows" or "blocks"
    config: dict = field(default_factory=dict, hash=False)
    jobs = "jobs_ops"

    def shapes(self, size):
        m, n, k = self.shape
        if self.op == "matmul_all_reduce":
            return (m, k), (k, n), (m, n)
        if self.op == "matmul_reduce_scatter":
            return (m * size, k), (k, n), (m * (size if self.layout == "tiles" else 1), n)
        if self.op == "all_gather_matmul":
            return ((m, k), (k, n), (m * size, n)) if self.dim == 0 else ((m, k), (k * size, n), (m, n))
        return (m, k), (k, n), (m * size, n) if self.dim == 0 else (m, n * size)

    def bias_shape(self, size):
        rows, columns = self.shapes(size)[2]
        if self.op == "matmul_all_gather":
            rows, columns = self.shape[0], self.shape[1]
        return {"": None, "columns": (columns,), "rows": (rows, 1)}[self.bias]

    def scale_shape(self, size, which):
        """Shape of the scales of A (0) or B (1), or None."""
        rows, columns = self.shapes(size)[which]
        rows, deep = (rows, columns) if which == 0 else (columns, rows)  # of A's rows, or B's columns
        if self.scales == "blocks":
            deep = math.ceil(deep / 128)
            return (rows, deep) if which == 0 else (deep, math.ceil(rows / 128))
        return None if not self.scales else (rows, 1) if which == 0 else (rows,)


def dims(op):
    return (0, 1) if op in ("all_gather_matmul", "matmul_all_gather") else (None,)


def algorithms(op, size):
    """Algorithms that serve so many ranks."""
    return ("unfused", FUSED[op] if size > 1 else None)


def kinds(size):
    """(op, algorithm, gather_dim) of all there are."""
    for op in OPS:
        yield from ((op, algorithm, dim) for algorithm, dim in itertools.product(algorithms(op, size), dims(op)))


def piece_cases(size):
    """A product for each member, the last one shorter."""
    for number, bias in enumerate(("", "columns", "rows")):
        shape, place = ((7, 44, 9), (1, 5, 3), (9, 40, 16))[number], ("heap", "gaps")[number % 2]
        yield Case("all_gather_matmul", "copy_engine_push", shape, "bfloat16", bias=bias, dim=0, place=place)
        for op in ("matmul_reduce_scatter", "matmul_all_reduce"):
            dtype = ("float32", "bfloat16")[number % 2]
            yield Case(op, "copy_engine", shape, dtype, bias=bias, out_place=place)


DIES = {**SEVERAL, "num_sms": 5, "num_xcds": 2, "chunk_size": 2}
"""Tiles are dealt out to dies; the fifth program stays where it is."""

FORMS = (
    ((1, 1, 1), "float32", "", "heap", {}), ((17, 33, 29), "float32", "", "ordinary", SEVERAL),
    ((40, 48, 64), "float16", "", "transposed", SEVERAL), ((5, 130, 3), "bfloat16", "", "skewed", {}),
    ((9, 26, 21), "bfloat16", "", "gaps", {"num_sms": 2}), ((50, 40, 16), "bfloat16", "", "heap", DIES),
    ((18, 24, 40), "float32", "", "transposed", {}), ((18, 24, 40), "float8_e4m3fn", "bfloat16", "gaps", {}),
    ((18, 24, 40), "float8_e5m2", "float32", "ordinary", {}),
)  # fmt: skip
"""Shapes, element types of operands and of outputs if they differ, places and configs."""


def form_cases(size):
    """Odd, small and larger shapes, every element type, place and bias, in one program and in several."""
    for number, (op, algorithm, dim) in enumerate(kinds(size)):
        is_fused = algorithm not in ("unfused", None)
        for i, (shape, dtype, out_dtype, place, config) in enumerate(FORMS):
            if out_dtype and algorithm == "unfused" and size > 1:
                continue  # torch multiplies no such operands without scales
            how = {"out_place": PLACES[(number + i) % len(PLACES)], "bias": ("", "columns", "rows")[(number + i) % 3]}
            yield Case(op, algorithm, shape, dtype, out_dtype, place, dim=dim, config=config if is_fused else {}, **how)
    if size > 1:  # a row for each member, with a bias of its own
        for algorithm in ("unfused", "push"):
            yield Case("matmul_reduce_scatter", algorithm, (1, 20, 3), bias="rows", out_place="ordinary")


SPLIT = {"num_sms": 7, "block_size_n": 16, "block_size_k": 16}
"""Several tiles, and several programs that share each; one more."""


def packet_cases(size):
    """Few rows and several tiles of them; one tile of all, several for a program, or shared ones."""
    forms = ((1, 16, 24), "float32", {}), ((5, 24, 160), "bfloat16", SPLIT), ((70, 40, 72), "float16", {"num_sms": 2})
    every = [(op, dim) for op in OPS for dim in dims(op)]
    for number, (op, dim) in enumerate(every):
        for i, (shape, dtype, config) in enumerate(forms):
            how = {"place": PLACES[(number + i) % 5], "out_place": PLACES[(number + 2 * i) % 5]}
            bias = ("", "columns", "rows")[(number + i) % 3]
            yield Case(op, "packets", shape, dtype, bias=bias, dim=dim, config=config, **how)
        for scales in ("rows", "blocks") if op != "all_gather_matmul" else ():
            config = {**SPLIT, "num_sms": 4, "block_size_k": 128}
            yield Case(op, "packets", (4, 32, 1040), "float8_e4m3fn", "float32", dim=dim, scales=scales, config=config)
    for bias in ("columns", "rows"):  # in two hops on 3 ranks and more, by tiles of 256 rows
        yield Case("matmul_all_reduce", "packets", (400, 336, 40), "float32", bias=bias, config={"num_sms": 3})


def all_cases(size):
    for make in (form_cases, layout_cases, piece_cases, scaled_cases):
        yield from (case for case in make(size) if size > 1 or "copy_engine" not in str(case.algorithm))


def thinned(cases, size):
    """Some of these: on 3 ranks a fifth, on others one of each operation, algorithm, gather_dim and layout.

    They differ in all the rest, and on every number of ranks they are others.
    """
    by_kind = {}
    for case in cases:
        by_kind.setdefault((case.op, case.algorithm, case.dim, case.layout), []).append(case)
    if size == 3:
        return [case for number, each in enumerate(by_kind.values()) for case in each[number % 5 :: 5] or each[-1:]]
    return [each[(5 * number + size) % len(each)] for number, each in enumerate(by_kind.values())]


def layout_cases(size):
    tiles = {"block_size_m": 16, "block_size_n": 16, "group_size_m": 2}
    for algorithm in algorithms("matmul_reduce_scatter", size):
        for bias in ("", "columns", "rows"):
            yield Case("matmul_reduce_scatter", algorithm, (21, 50, 17), layout="tiles", bias=bias, config=tiles)
    yield Case("matmul_reduce_scatter", None, (130, 70, 17), layout="tiles")


def scaled_cases(size):
    """8-bit floats with scales, in several tiles, the last ones cut off, and in blocks, the last ones shorter."""
    for number, (op, algorithm, dim) in enumerate(kinds(size)):
        for i, scales in enumerate(("rows", "blocks")) if (op, dim) != ("all_gather_matmul", 1) else ():
            turn, config = number + i, {**SEVERAL, "block_size_k": (64, 128)[i]}
            how = {"scales": scales, "bias": ("", "columns", "rows")[turn % 3], "dim": dim}
            how["place"], how["out_place"] = ("gaps", "ordinary", "heap", "inner")[turn % 4], PLACES[turn % 5]
            dtypes = (("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float32"))[number % 2]
            yield Case(op, algorithm, (18, 140, 150), *dtypes, **how, config=config if algorithm == FUSED[op] else {})
    for op, algorithm in (("all_gather_matmul", "copy_engine_push"), *((op, "copy_engine") for op in OPS[::3])):
        for scales, bias, place in (("rows", "rows", "gaps"), ("blocks", "", "heap"), ("blocks", "columns", "inner")):
            how = {"dim": dims(op)[0], "scales": scales, "bias": bias, "place": place}
            shape = (8, 144, 512) if place == "inner" else (7, 44, 139)  # which torch multiplies on Hopper, or does not
            yield Case(op, algorithm, shape, "float8_e4m3fn", "bfloat16", **how)
    yield Case("matmul_reduce_scatter", None, (1, 3, 5), "float8_e4m3fn", "float16", scales="blocks", layout="tiles")


def is_exact(turn):
    """Whether operands are small whole numbers, of which no sum is rounded; in the other turns they are any numbers."""
    return turn % 2 == 0


def operand(case, rank, size, which, turn=0):
    """A rank's A (0) or B (1), the bias (2), in its own type, or the scales of A (3) or B (4)."""
    generator = torch.Generator().manual_seed(1000 * turn + 10 * rank + which)
    if which > 2:
        shape = case.scale_shape(size, which - 3)
        if shape is None:
            return None
        values = torch.rand(shape, generator=generator) * 2
        return 1 + (values > 1).float() if is_exact(turn) else values + 0.1
    shape = case.bias_shape(size) if which == 2 else case.shapes(size)[which]
    if shape is None:
        return None
    if which == 2 and case.op in ("matmul_all_reduce", "matmul_reduce_scatter"):  # equal where results are shared
        own_rows = case.op == "matmul_reduce_scatter" and case.bias == "rows" and case.layout == "torch"
        generator.manual_seed(1000 * turn + 7 + (10 * rank if own_rows else 0))
    if is_exact(turn):
        values = torch.randint(1, 9 if which == 2 else 3, shape, generator=generator).float()
        values *= torch.randint(0, 2, shape, generator=generator) * 2 - 1
        if which != 2:
            products = 6 if case.scales else 28  # of an element
            values *= torch.rand(shape, generator=generator) < min(1.0, (products / (case.shape[2] * size)) ** 0.5)
    else:
        values = torch.randn(shape, generator=generator)
    return values.to(getattr(torch, (case.out_dtype if which == 2 else "") or case.dtype))


def owned_tiles(case, rank, size):
    """Mask of a rank's elements in the layout of tiles."""
    config = {"block_size_m": 256, "block_size_n": 64, "group_size_m": 1} | case.config
    blocks = (config[name] for name in ("block_size_m", "block_size_n", "group_size_m"))
    return tiles_of(case.shapes(size)[2], *blocks, rank, size)


def tiles_of(shape, high, wide, group, rank, size, in_turn=False):
    """Mask of the tiles of a rank, numbered as AMD's Iris does: `group` rows of tiles column by column."""
    down, right = (math.ceil(length / tile) for length, tile in zip(shape, (high, wide), strict=True))
    order = [(r, c) for g in range(0, down, group) for c in range(right) for r in range(g, min(g + group, down))]
    each, mask = math.ceil(len(order) / size), torch.zeros(shape, dtype=torch.bool)
    for r, c in order[rank::size] if in_turn else order[rank * each : (rank + 1) * each]:
        mask[r * high : (r + 1) * high, c * wide : (c + 1) * wide] = True
    return mask


def scaled(case, rank, size, which, turn):
    """A rank's A (0) or B (1) times its scales, in float64."""
    values, scales = operand(case, rank, size, which, turn).double(), operand(case, rank, size, 3 + which, turn)
    if scales is None:
        return values
    if case.scales == "blocks":
        scales = scales.repeat_interleave(128, 1)[:, : values.shape[1]]
        scales = scales.repeat_interleave(128, 0)[: values.shape[0]] if which == 1 else scales
    return values * scales.double()


def expected(case, rank, size, turn=0):
    """The output of a rank in float64, and for each element the sum of the absolute values that it is made of."""
    a, b = ([scaled(case, r, size, which, turn) for r in range(size)] for which in range(2))
    bias = [operand(case, r, size, 2, turn) for r in range(size)]
    added = [torch.zeros(()) if each is None else each.double() for each in bias]

    def compute(change):
        if case.op == "matmul_all_reduce":
            return sum(change(x) @ change(y) for x, y in zip(a, b, strict=True)) + change(added[rank])
        if case.op == "matmul_reduce_scatter":
            whole = sum(change(x) @ change(y) for x, y in zip(a, b, strict=True))
            part = whole if case.layout == "tiles" else whole.chunk(size)[rank]
            return part + change(added[rank])
        if case.op == "all_gather_matmul":
            return torch.cat([change(x) for x in a], case.dim) @ change(b[rank]) + change(added[rank])
        products = [change(x) @ change(y) + change(z) for x, y, z in zip(a, b, added, strict=True)]
        return torch.cat(products, case.dim)

    return compute(lambda x: x), compute(torch.abs)


ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Relative error of one rounding to a type."""

EXACT = {"float32": 2**24, "float16": 2**11, "bfloat16": 2**8}
"""Up to which all whole numbers are exact."""


def tolerance(case, made_of, size, turn, on_gpu):
    """How far each element may be from the right one; `made_of` are the sums of absolute values of `expected`."""
    out = case.out_dtype or case.dtype
    if is_exact(turn):
        assert float(made_of.max()) <= EXACT[out], f"{case}: data is not exact"
        return torch.zeros_like(made_of)
    roundings = 3  # of the product, of the sum, with the bias
    if out == "float32":
        roundings = 4 * (size + case.shape[2] ** 0.5)  # sums are as long as that; they are rounded up and down
    bound = roundings * ROUNDING[out]
    if on_gpu and case.dtype.startswith("float8"):
        bound = max(bound, 2.0**-10)  # Hopper adds their products up with 14 bits
    return bound * made_of


def wrong_elements(case, got, rank, size, turn, on_gpu=False):
    """What is wrong with a rank's output, as float64 on the CPU; an empty list if nothing is."""
    want, made_of = expected(case, rank, size, turn)
    allowed, wrong = tolerance(case, made_of, size, turn, on_gpu), []
    if case.layout == "tiles":
        own = owned_tiles(case, rank, size)
        if not bool((got[~own] == UNTOUCHED).all()):
            wrong.append(f"rank {rank} changed elements that are not its own")
        got, want, allowed = got[own], want[own], allowed[own]
    bad = ~((got - want).abs() <= allowed)  # NaN is none that is smaller
    if bad.any():
        i = int(bad.flatten().nonzero()[0])
        is_, right, bound = (float(x.flatten()[i]) for x in (got, want, allowed))
        count = f"{int(bad.sum())} of {bad.numel()} elements"
        wrong.append(f"rank {rank} of {size}: {count}, the first one is {is_} and not {right}, allowed {bound}")
    return wrong
