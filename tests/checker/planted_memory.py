"""Planted mistakes in what memory a kernel touches; see `corpus`."""

import inspect

import torch
from corpus import Case, N, flags, given, heap, kernel, local, out, registry
from triton.tools.tensor_descriptor import TensorDescriptor

CASES, case, planted = registry()

READ = "tl.store(out + i, tl.load(data + i))  # B"
ALONE = {"ranks": 1, "kind": "bounds"}
planted(
    ("unwritten", "A kernel reads what was not written.", READ, None, given(ranks=1, kind="uninitialised",
     data=(heap(N), lambda ctx: ctx.empty(N)))),
)  # fmt: skip

WRITES = {
    "index_put": lambda data, n: data.__setitem__(torch.arange(n), 1.0),
    "index_fill": lambda data, n: data.index_fill_(0, torch.arange(n), 1.0),
    "scatter": lambda data, n: data.scatter_(0, torch.arange(n), 1.0),
    "put": lambda data, n: data.put_(torch.arange(n), torch.ones(n)),
    "masked_fill": lambda data, n: data.masked_fill_(torch.arange(N) < n, 1.0),
    "foreach_zero": lambda data, n: torch._foreach_zero_([data[:n]]),
    "foreach_copy": lambda data, n: torch._foreach_copy_([data[:n]], [torch.ones(n)]),
    "sort": lambda data, n: torch.sort(torch.ones(n), out=(data[:n], torch.empty(n, dtype=torch.int64))),
}
"""Operations that write the first elements, and read none."""


def written(name, write):
    """Enter an operation that writes all elements but one before they are read."""

    @case(ranks=1, kind="uninitialised")
    def run(ctx, bug):
        data = ctx.empty(N)
        write(data, N - bug)
        data.sum()  # B

    CASES[f"written_by_{name}"] = CASES.pop("run")


for name, write in WRITES.items():
    written(name, write)


def read(ctx, data):
    launch = kernel(READ, "data", "out")[(1,)]
    launch(ctx.get_device_context(), data, out(ctx), RANK=ctx.cur_rank, WORLD=ctx.num_ranks)


FREED = {
    "freed_block": lambda ctx, data, part: read(ctx, data),
    "freed_on_the_host": lambda ctx, data, part: data.add_(1),
    "freed_before_a_collective": lambda ctx, data, part: ctx.ccl.all_reduce(ctx.zeros((4, N)), data),
    "view_of_a_freed_block": lambda ctx, data, part: read(ctx, part),
}
"""Uses of a tensor, or of a part of it."""


def freed(name, use):
    """Enter a use of a tensor whose block belongs to another one by now."""

    def run(ctx, bug):
        data = ctx.zeros((4, N))
        part = data[1]
        if bug:
            ctx.free(data)
        ctx.barrier()
        other = ctx.zeros((4, N))
        use(ctx, data, part)
        ctx.barrier()
        del other

    lines, first = inspect.getsourcelines(read)
    line = first + len(lines) - 1 if "read" in use.__code__.co_names else use.__code__.co_firstlineno
    CASES[name] = Case(run, 2, "freed", {"A": set(), "B": {line}})


for name, use in FREED.items():
    freed(name, use)


planted(
    ("off_by_one", "One element too far: another tensor begins there.", "tl.store(data + 0 + i, x)  # B", {"0": "1"},
     given(**ALONE, data=heap(N), other=heap(N))),
    ("off_by_one_remote", "The same in a peer's memory.", "ctx.store(data + 0 + i, x, peer)  # B", {"0": "1"},
     given(kind="bounds", data=heap(N), other=heap(N))),
)  # fmt: skip
COLUMNS = {"data": lambda ctx: ctx.zeros((4, 2 * N))[:, N:], "row": 2 * N}
TOO_EARLY = {"row + i": "row + i - 1"}
planted(
    ("beyond_a_view", "A kernel of half of the columns reads another one.",
     "tl.store(out + i, tl.load(data + row + i))  # B", TOO_EARLY, given(**ALONE, **COLUMNS)),
    ("beyond_a_remote_view", "The same in a peer's memory.", "tl.store(out + i, ctx.load(data + row + i, peer))  # B",
     TOO_EARLY, given(kind="bounds", **COLUMNS)),
    ("before_a_view", "A mask that begins one element too early.",
     "y = tl.load(data + row + i - 1, mask=i >= 1, other=0)  # B\ntl.store(out + i, y)", {">= 1": ">= 0"},
     given(**ALONE, **COLUMNS)),
    ("atomics_beyond_a_view", "Additions to another half of the columns.", "tl.atomic_add(data + row + i, x)  # B",
     TOO_EARLY, given(**ALONE, **COLUMNS)),
    ("into_another_tensor", "An offset that is so wrong that all of the access lies in another tensor.",
     "tl.store(out + i, tl.load(data + row + i))  # B", {"row": "2 * N + row"}, given(**ALONE,
     data=heap(2 * N), other=heap(2 * N), row=N)),
    ("descriptor_beyond_a_view", "A descriptor that says more rows than the tensor has.",
     "y = data.load([1, 0])  # B\ntl.store(out + i, y.reshape([N]))", None, given(**ALONE,
     data=tuple(lambda ctx, n=n: TensorDescriptor(ctx.zeros((4, N))[:n], [2, N], [N, 1], [1, N]) for n in (2, 1)))),
    ("wraps_into_the_tensor", "A product of int32 that is too large becomes an offset of another row.",
     "tl.store(out + i, tl.load(data + row * stride + i))  # B", None, given(ranks=1, kind="wrapped", data=heap(4, N),
     row=(3, 1 << 16), stride=(N, (1 << 16) + 2 * N))),
    ("block_that_wraps", "Some rows of a block lie behind 2**31 elements, and come from the beginning.", """
row, column = first + tl.arange(0, 4), tl.arange(0, 8)
offset = ((row * stride) % 32)[:, None] + column  # what wraps on purpose
mask = (row < first + 3)[:, None]
y = tl.load(data + offset, mask=mask & (column < 8), other=0)  # B
tl.store(out + tl.arange(0, 4)[:, None] * 8 + column, y)
""", {"((row * stride) % 32)[:, None]": "row[:, None] * stride"}, given(ranks=1, kind="wrapped", data=heap(64),
     first=(1 << 16) - 1, stride=1 << 16)),
)  # fmt: skip

WIDE = "words.to(tl.pointer_type(tl.int64), bitcast=True), tl.full((), 1, tl.int64), 0)  # B"
FLOAT = "ctx.atomic_add(words.to(tl.pointer_type(tl.float32), bitcast=True), 1.0, 0)"
planted(
    ("atomics_of_two_widths", "To 32 bits, and to the 64 that have them.",
     "if RANK == 0:\n    ctx.atomic_add(words, 1, 0)  # A\nelse:\n    ctx.atomic_add(words, 1, 0)",
     {"else:\n    ctx.atomic_add(words, 1, 0)": f"else:\n    ctx.atomic_add({WIDE}"}, given(words=flags(2))),
    ("atomics_of_two_types", "One rank adds an integer, one a float.",
     f"if RANK == 0:\n    {FLOAT}  # A\nelse:\n    {FLOAT}",
     {f"else:\n    {FLOAT}": "else:\n    ctx.atomic_add(words, 1, 0)  # B"}, given(words=flags(2))),
)  # fmt: skip

MASKED = """
mask = i < N - 3
y = tl.load(data + i, mask=mask, other=0)
tl.store(out + i, y * 2, mask=mask)
tl.store(out, tl.sum(y, 0))  # B
"""
UNDEFINED = "y = tl.load(data + i, mask=mask)  # A"
TAKEN_OUT = "y = tl.where(mask, y, 0)"
planted(
    ("lanes_without_other", "A sum has lanes that the mask of the load has left out.", MASKED,
     {"y = tl.load(data + i, mask=mask, other=0)": UNDEFINED}, given(ranks=1, kind="undefined", data=heap(N))),
    ("lanes_of_half_precision", "The same in float16; in the twin they are taken out afterwards.",
     MASKED.replace("y = tl.load(data + i, mask=mask, other=0)", f"{UNDEFINED}\n{TAKEN_OUT}"), {TAKEN_OUT: ""},
     given(ranks=1, kind="undefined", data=heap(N, dtype=torch.float16), out=local(N, dtype=torch.float16))),
    ("index_without_other", "Rows are loaded from places that are undefined where the mask has left out the index.", """
mask = i < N - 3
row = tl.load(index + i, mask=mask)
y = tl.load(data + row, mask=mask, other=0)
tl.store(out + i, y)
""", {"data + row, mask=mask, other=0)": "data + row)  # B"}, given(**ALONE, index=flags(N), data=heap(N))),
)  # fmt: skip
