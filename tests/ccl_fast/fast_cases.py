"""Calls of the algorithms of packets; the cases are those of tests/ccl."""

import itertools

from ccl_cases import FLOATS, INTEGERS, ROOTED, Case, reductions

OFF_HEAP = ("ordinary", "strided", "strided ordinary", "transposed", "input only")
"""Where the output is no memory of the heap, or has gaps."""
ALGORITHMS = {
    "ll": ("one_shot", "mailbox"),
    "ll128": ("one_shot", "two_shot", "mailbox"),
    "sentinel": ("one_shot", "two_shot", "mailbox", "split"),
}
"""What each encoding has, of all operations."""
ENCODINGS = tuple(ALGORITHMS)
OPERATIONS = {
    "one_shot": ("all_reduce",),
    "two_shot": ("all_reduce",),
    "mailbox": ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter"),
    "split": ("all_reduce",),
}
MOVING = ("all_gather", "all_to_all", "broadcast", "gather", "scatter")


def algorithms(encoding):
    """(operation, algorithm) for an encoding."""
    for form in ALGORITHMS[encoding]:
        for op in OPERATIONS[form]:
            if not (encoding == "sentinel" and op in MOVING):
                yield op, f"{encoding}_{form}"


def dtypes(encoding):
    """What the encoding can carry."""
    return FLOATS[:3] if encoding == "sentinel" else (*FLOATS, *INTEGERS, "bool")


def dtype_cases(encoding):
    """Every dtype with every reduction; moves with dtypes that cannot be reduced, too."""
    for op, algorithm in algorithms(encoding):
        config = {"algorithm": algorithm}
        if op in MOVING:
            for dtype in (*dtypes(encoding), "float8_e4m3fn", "complex64", "complex128"):
                yield Case(op, dtype, shape=(5, 3), config=config)
        else:
            for dtype in dtypes(encoding):
                for reduction in reductions(dtype):
                    yield Case(op, dtype, reduction, shape=(5, 3), config=config)


def shape_cases(encoding):
    """Shapes with every kind of tail: elements of one byte and more, whole packets and lines, and nothing at all."""
    small = "float16" if encoding == "sentinel" else "int8"
    for op, algorithm in algorithms(encoding):
        for count in (0, 1, 2, 7, 8, 9, 15, 16, 17, 119, 120, 121, 128, 1003):
            yield Case(op, small, shape=(count,), config={"algorithm": algorithm})
        for shape in ((1003,), (2, 3, 5, 7), (4001,)):
            yield Case(op, "float32", shape=shape, config={"algorithm": algorithm})


def place_cases(encoding):
    """Wherever tensors lie, in one program and in several."""
    places = ("heap", "ordinary", "skewed", "strided", "strided ordinary", "transposed", "input only", "output only")
    for (op, algorithm), place in itertools.product(algorithms(encoding), places):
        config = {"algorithm": algorithm}
        if place in OFF_HEAP and algorithm.endswith("split"):
            continue
        yield Case(op, "bfloat16", shape=(9, 101), place=place, config=config)
        yield Case(op, "float32", shape=(9, 101), place=place, config={**config, "comm_sms": 3, "num_warps": 1})


def way_cases(encoding):
    """In place, and with one part for each member along a dimension of its own."""
    for op, algorithm in algorithms(encoding):
        config = {"algorithm": algorithm}
        if op in ROOTED:
            yield Case(op, "float16", shape=(5, 33), root=1, in_place=op != "broadcast", config=config)
        elif op != "all_to_all":
            yield Case(op, shape=(7, 33), in_place=True, config=config)
            yield Case(op, "bfloat16", shape=(9, 301), in_place=True, config={**config, "comm_sms": 2, "num_warps": 1})
        if op in ("all_gather", "reduce_scatter"):
            yield Case(op, stacked=True, config=config)


def piece_cases(encoding):
    """Messages that do not fit into a small mailbox at once."""
    for op, algorithm in algorithms(encoding):
        config = {"algorithm": algorithm, "num_warps": 4}
        for count, programs in ((4001, 1), (4096, 3), (9001, 2)):
            yield Case(op, "float16", shape=(count,), config={**config, "comm_sms": programs})
        yield Case(op, "float32", shape=(5003,), in_place=op == "all_reduce", config=config)
