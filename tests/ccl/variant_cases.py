"""Calls of portable algorithms by name: of all that the other tests of this folder do not call."""

import itertools

from ccl_cases import FLOATS, INTEGERS, OPS, PLACES, REDUCING, Case, input_shape, output_shape, reductions

from iris_core.types import CollectiveRequest, DeviceTarget, DeviceType
from iris_triton.collectives import collectives
from iris_triton.collectives.packets.base import PacketCollective

USUAL = ("pull", "one_shot", "two_shot")
"""Algorithms that other tests call."""
SHAPES = ((1003,), (7, 33), (2, 3, 5, 7), (1,), (2011,))
MOVED = ("float8_e4m3fn", "complex64", "complex128")
IN_PLACE = {
    "all_reduce": ("heap", "ordinary", "skewed", "strided", "transposed"),
    "all_gather": ("heap", "ordinary", "skewed"),
    "reduce_scatter": ("heap", "ordinary", "skewed"),
}
"""Where tensors of operations that work in place can lie."""
OFF_HEAP_OUT = ("ordinary", "strided", "strided ordinary", "transposed", "input only")


def algorithms():
    """The algorithms."""
    named = {(each.op, each.name): each for each in collectives() if not isinstance(each, PacketCollective)}
    return [each for (op, name), each in named.items() if op in OPS and name not in USUAL]


def labels():
    """(operation, name) of each."""
    return [(each.op, each.name) for each in algorithms()]


def request(case, size, **changes):
    """What an algorithm is asked on rank 0, as far as `supports` may look."""
    config = {name: value for name, value in case.config.items() if name != "algorithm"}
    options = {"layout": case.layout, "uneven": bool(case.splits), "in_place": case.in_place, "config": config}
    options |= {"out_shape": output_shape(case, 0, size), "root": case.root}
    if case.op in REDUCING:
        options["reduction"] = case.reduction
    dense = "strided" not in case.place and case.place != "transposed"
    fields = {
        "op": case.op, "shape": input_shape(case, 0, size), "dtype": case.dtype, "nbytes": 4096, "rank": 0,
        "group_size": size, "target": DeviceTarget(DeviceType.CPU), "options": options,
        "direct_in": dense and case.place not in ("ordinary", "output only"),
        "direct_out": case.place not in OFF_HEAP_OUT,
    }  # fmt: skip
    strides = [_stride(shape, case.place) for shape in (fields["shape"], options["out_shape"])]
    options["in_stride"], options["out_stride"] = strides
    return CollectiveRequest(**fields | changes)


def _stride(shape, place):
    """Strides of a tensor of tests, as far as it matters whether it is dense."""
    step, strides = 2 if "strided" in place else 1, []
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(reversed(strides)) if place == "transposed" and len(shape) == 2 else tuple(strides)


def _configs(algorithm, size):
    """Ways to divide a launch: as usual, and in several programs and many blocks."""
    several = {"block_size_m": 8, "block_size_n": 16, "comm_sms": 2 * size if algorithm.name == "partitioned" else 3}
    yield {}
    if "block_size_m" in algorithm.uses:
        yield several


def _served(algorithm, case, size):
    return bool(algorithm.supports(request(case, size)))


def _kind(algorithm, i, size, dtypes, configs):
    """The `i`-th of calls that differ from each other in everything at once."""
    op, dtype, place = algorithm.op, dtypes[(i + 5 * size) % len(dtypes)], PLACES[(i + size) % len(PLACES)]
    known = reductions(dtype) if op in REDUCING else ("sum",)
    possible = IN_PLACE.get(op, ())
    return Case(
        op, dtype, known[(i + size) % len(known)], shape=SHAPES[(i + i // 5) % len(SHAPES)], place=place, root=i % size,
        config=configs[i % len(configs)], in_place=i % 3 != 0 and place in possible,
    )  # fmt: skip


def some_cases(size, number):
    """So many calls of each algorithm, which differ from each other in everything at once, as well as it goes."""
    for algorithm in algorithms():
        op = algorithm.op
        dtypes = (*FLOATS, *INTEGERS, "bool", *(MOVED if op not in REDUCING else ()))
        configs = [{"algorithm": algorithm.name} | config for config in _configs(algorithm, size)]
        kinds = (_kind(algorithm, i, size, dtypes, configs) for i in itertools.count())
        served = (case for case in itertools.islice(kinds, 20 * number) if _served(algorithm, case, size))
        yield from itertools.islice(served, number)
        yield Case(op, shape=(3, 0), config={"algorithm": algorithm.name})


def all_cases(size):
    """Every dtype with every reduction, every place in every way, for each algorithm."""
    for algorithm in algorithms():
        op = algorithm.op
        configs = [{"algorithm": algorithm.name} | config for config in _configs(algorithm, size)]
        dtypes = (*FLOATS, *INTEGERS, "bool", *(MOVED if op not in REDUCING else ()))
        cases = [
            Case(op, dtype, reduction, shape=(5, 3), config=configs[0])
            for dtype in dtypes
            for reduction in (reductions(dtype) if op in REDUCING else ("sum",))
        ]
        for place, config in itertools.product(PLACES, configs):
            cases.append(
                Case(op, "bfloat16" if config is configs[0] else "int32", shape=(9, 101), place=place, config=config)
            )
            cases.append(Case(op, "float32", shape=(1,), place=place, root=size - 1, config=config))
        if op in ("all_reduce", "all_gather", "reduce_scatter"):
            cases += [
                Case(op, shape=(33, 5), place=place, in_place=True, config=configs[-1])
                for place in ("heap", "ordinary")
            ]
        yield from (case for case in cases if _served(algorithm, case, size))


def piece_cases():
    """Messages that are larger than a small workspace."""
    kinds = (("float32", "ordinary"), ("bfloat16", "heap"), ("int8", "output only"))
    for number, algorithm in enumerate(algorithms()):
        config = {"algorithm": algorithm.name}
        dtype, place = kinds[number % 3]
        yield Case(algorithm.op, dtype, shape=(3, 701), place=place, config=config)
