"""Fused products for Hopper: the core of `iris_gluon.gemm` with orders and sinks that communicate.

`push_product`: every tile goes to the outputs of all members, by TMA, while the next one is computed.
`reduce_product`: every tile goes into a slot of its owner, that of the next member first; owners add up the slots in
the group's order, in float32.  Members own rows of tiles.
`await_product`: copy engines bring the others' rows of A here, and a word behind each shard; the warp that loads waits
for it.
`fetch_product`: some programs copy the others' rows of A here by TMA, the next member's first, and set a flag for each
block of rows; the others begin with the own rows, and the warp that loads waits for flags.

The protocols are those of `iris_triton.ops`.  Where all programs meet, a tile is computed, and added up, by the
programs of the same number on all members, so only those meet.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.target_info import is_cuda

from iris_gluon._compat import aggregate, tma_store
from iris_gluon.bulk import get_bulk
from iris_gluon.gemm import AddBias, RowGroups, ScatterTile, StoreTile, multiply_tiles
from iris_gluon.lanes import default_layout
from iris_triton.collectives.meeting import last_epoch, leave, meet, members_of, row_of, tell, told, told_second
from iris_triton.cpu.entries import cpu_entry
from iris_triton.flags import await_own_flag, set_flag

PER_CALL = ("out", "a", "b", "bias")
"""Arguments that may lie anywhere; they begin at multiples of 16 bytes, as TMA wants."""

RUNTIME = (
    "me", "rank", "m", "n", "k", "a_down", "b_down", "out_down", "out_right", "bias_step", "tiles_m", "tiles_n",
    "k_tiles", "rows_each", "timeout_ns", "status",
)  # fmt: skip
"""Arguments for whose values kernels are not compiled anew: a 1 would be a constant, which no order can hold."""

_SUM_ROWS = gl.constexpr(16)
"""Rows of a tile that are added up at a time: more would not fit into registers."""


@aggregate
class OwnersInTurn:
    """Tiles of one owner after the other, beginning with that of the member after this one, its own ones last.

    Program p takes the same tiles on every member, those whose number is p modulo the number of programs.

    Attributes:
        tiles_each: rows of tiles that a member owns (int32).
        tiles_n: columns of tiles (int32).
        first: number of the first tile of the member after this one (int32).
        group: row tiles of a group (constexpr).
        size: number of members (constexpr).
    """

    tiles_each: gl.tensor
    tiles_n: gl.tensor
    first: gl.tensor
    group: gl.constexpr
    size: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles_each, tiles_n, first, group, size):
        self.tiles_each = tiles_each
        self.tiles_n = tiles_n
        self.first = first
        self.group = gl.constexpr(group)
        self.size = gl.constexpr(size)

    @gluon.jit
    def place(self, tile):
        """Return row and column of a tile, counted in tiles."""
        programs = gl.num_programs(0)
        program = tile % programs
        mine = (self.tiles_each * self.tiles_n * self.size - program + programs - 1) // programs
        begin = (gl.maximum(self.first - program, 0) + programs - 1) // programs
        return self.numbered(program + (begin + tile // programs) % mine * programs)

    @gluon.jit
    def numbered(self, number):
        """Return row and column of the tile with a number: owner by owner, within one as `RowGroups`."""
        per_owner = self.tiles_each * self.tiles_n
        row, column = RowGroups(self.tiles_each, self.tiles_n, self.group).place(number % per_owner)
        return number // per_owner * self.tiles_each + row, column

    @gluon.jit
    def await_operands(self, row, column):
        """Return at once: all operands are local."""
        pass


@aggregate
class OwnersSlot:
    """This member's slot in the memory of the owner of a tile.

    Attributes:
        matrices: tuple of tensor descriptors, one for each owner: the rows that it owns.
        rows_each: rows of an owner (int32).
    """

    matrices: gl.tuple
    rows_each: gl.tensor

    @gluon.constexpr_function
    def __init__(self, matrices, rows_each):
        self.matrices = gl.tuple(matrices)
        self.rows_each = rows_each

    @gluon.jit
    def store(self, part, row, column):
        """Begin to copy a part to its owner."""
        owner = row // self.rows_each
        for i in gl.static_range(len(self.matrices)):
            if owner == i:
                tma_store(self.matrices[i], [row - owner * self.rows_each, column], part)

    @gluon.jit
    def finish(self, acc, row, column):
        """Return the sums as they are."""
        return acc


@gluon.jit
def _order_before_loads():
    """Let TMA loads that follow see what this thread has been told of."""
    if is_cuda():
        gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@cpu_entry(_order_before_loads)
def _cpu_order_before_loads(program):
    return None  # the CPU has one kind of access


@aggregate
class ShardsInTurn:
    """Rows of one member after the other, beginning with the own ones; those of others when they have been copied.

    Attributes:
        tiles_each: rows of tiles of a member (int32).
        tiles_n: columns of tiles (int32).
        me: this member (int32).
        flags: pointer to integers, one for `tiles_per_flag` rows of tiles.
        generation: value that a flag reaches in this launch, of the flags' type.
        tiles_per_flag: rows of tiles that come together (int32).
        timeout_ns, status, rank: bound of the waits, and where they report.
        group: row tiles of a group (constexpr).
        size: number of members (constexpr).
        scope: who sets the flags: "gpu" for programs of this launch, "sys" for all others (constexpr).
    """

    tiles_each: gl.tensor
    tiles_n: gl.tensor
    me: gl.tensor
    flags: gl.tensor
    generation: gl.tensor
    tiles_per_flag: gl.tensor
    timeout_ns: gl.tensor
    status: gl.tensor
    rank: gl.tensor
    group: gl.constexpr
    size: gl.constexpr
    scope: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, tiles_each, tiles_n, me, flags, generation, tiles_per_flag, timeout_ns, status, rank, group, size, scope
    ):
        self.tiles_each = tiles_each
        self.tiles_n = tiles_n
        self.me = me
        self.flags = flags
        self.generation = generation
        self.tiles_per_flag = tiles_per_flag
        self.timeout_ns = timeout_ns
        self.status = status
        self.rank = rank
        self.group = gl.constexpr(group)
        self.size = gl.constexpr(size)
        self.scope = gl.constexpr(scope)

    @gluon.jit
    def place(self, tile):
        """Return row and column of a tile, counted in tiles."""
        per_shard = self.tiles_each * self.tiles_n
        row, column = RowGroups(self.tiles_each, self.tiles_n, self.group).place(tile % per_shard)
        return (self.me + tile // per_shard) % self.size * self.tiles_each + row, column

    @gluon.jit
    def await_operands(self, row, column):
        """Return when the rows of A are there.  Called by the loading warp, tile by tile."""
        if row // self.tiles_each != self.me:
            flag = self.flags + row // self.tiles_per_flag
            await_own_flag(
                flag, self.generation, "reached", "acquire", self.scope, self.timeout_ns, self.status, self.rank
            )
            _order_before_loads()


@gluon.jit
def _matrix(address, like, rows, columns, down, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Describe a matrix at an address (int64) for TMA, with elements like those of a pointer."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], like.dtype.element_ty)
    pointer = gl.multiple_of(address.to(like.dtype), 16)
    return tma.make_tensor_descriptor(pointer, [rows, columns], [down, 1], [BLOCK_M, BLOCK_N], layout)


@gluon.jit
def _operand(
    matrix, rows, columns, down, BLOCK_ROWS: gl.constexpr, BLOCK_COLUMNS: gl.constexpr, TURNED: gl.constexpr
):  # fmt: skip
    """Describe an operand for TMA, by rows or, TURNED, by columns."""
    if TURNED:
        return _matrix(matrix.to(gl.int64), matrix, columns, rows, gl.cast(down, gl.int64), BLOCK_COLUMNS, BLOCK_ROWS)
    else:
        return _matrix(matrix.to(gl.int64), matrix, rows, columns, gl.cast(down, gl.int64), BLOCK_ROWS, BLOCK_COLUMNS)


@gluon.jit
def _with_bias(sink, bias, step, m, n, BIAS: gl.constexpr):
    """Add the bias, if there is one, before the tiles go to the sink."""
    if BIAS == "none":
        return sink
    else:
        limit = n
        if BIAS == "rows":
            limit = m
        return AddBias(sink, bias, gl.cast(step, gl.int64), limit, BIAS)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_product(
    out, a, b, bias, control, bases, me, rank, m, n, k, a_down, b_down, out_down, bias_step, tiles_m, tiles_n, k_tiles,
    timeout_ns, status,
    SIZE: gl.constexpr, DIM: gl.constexpr, BIAS: gl.constexpr, TURNED_A: gl.constexpr, TURNED_B: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Store A @ B into its place in the outputs of all members.

    Two meetings: the outputs may be written to; they are complete.

    Args:
        out: the output of this member, which others write to: dense rows.
        a, b: the operands.
        bias: or None; see BIAS.
        control: the team's control region (int64).
        bases: int64[SIZE], the members' heaps.
        me, rank: the caller's index in the team, and in the world.
        m, n, k: of the product.
        a_down, b_down, out_down: elements from row to row, or column to column; multiples of 16 bytes.
        bias_step: elements between values of the bias.
        tiles_m, tiles_n, k_tiles: tiles of the product, and steps of the inner dimension.
        timeout_ns, status: bound of waits, and where they report.
        SIZE: number of members.
        DIM: 0 if the products lie below each other in the output, 1 if beside each other.
        BIAS: what the bias lies along: "columns", "rows" (of this member's product) or "none".
        TURNED_A, TURNED_B: the operand lies by columns, not by rows.
        BLOCK_M ... NUM_WARPS: see `iris_gluon.gemm.GemmConfig`.
    """
    ITEM: gl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    nothing = members_of(SIZE).to(gl.int64) * 0
    tell(row, bases, me, nothing + (out.to(gl.int64) - gl.load(bases + me)), nothing + out_down, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    matrices = ()
    for i in gl.static_range(SIZE):  # the next member first, the own output last
        peer = (me + 1 + i) % SIZE
        stride = told_second(row, peer, SIZE)
        address = gl.load(bases + peer) + told(row, peer, SIZE)
        if DIM == 0:
            address += gl.cast(me, gl.int64) * m * stride * ITEM
        else:
            address += gl.cast(me, gl.int64) * n * ITEM
        matrices = matrices + (_matrix(address, out, m, n, stride, BLOCK_M, BLOCK_N // PARTS),)  # noqa: RUF005
    multiply_tiles(
        _operand(a, m, k, a_down, BLOCK_M, BLOCK_K, TURNED_A), _operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        RowGroups(tiles_m, tiles_n, GROUP), _with_bias(ScatterTile(matrices), bias, bias_step, m, n, BIAS),
        tiles_m * tiles_n, k_tiles, STAGES, PARTS, NUM_WARPS, 0, TURNED_A, TURNED_B,
    )  # fmt: skip
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@gluon.jit
def _add_up(
    out, bias, slots, row, bases, me, first, column, rows, m, n, rows_each, out_down, out_right, bias_step,
    SIZE: gl.constexpr, FORM: gl.constexpr, BIAS: gl.constexpr, OUT_WIDE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr
):  # fmt: skip
    """Add up a tile of the own rows, and store the sum; `first` and `column` are where it begins among them."""
    n = n // 8 * 8  # nothing but a promise: accesses may be 16 bytes wide
    layout: gl.constexpr = default_layout([_SUM_ROWS, BLOCK_N], vector=8)
    lane_m = gl.arange(0, _SUM_ROWS, layout=gl.SliceLayout(1, layout))
    j = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    wide = gl.multiple_of(slots.to(gl.int64).to(slots.dtype), 16)
    apart = gl.cast(rows_each, gl.int64) * n
    for within in range(0, BLOCK_M, _SUM_ROWS):
        i = first + within + lane_m
        mask = (i < rows)[:, None] & (j < n)[None, :]
        place = i.to(gl.int64)[:, None] * n + j[None, :]
        total = gl.zeros([_SUM_ROWS, BLOCK_N], gl.float32, layout)
        for source in gl.static_range(SIZE):
            total += gl.load(wide + source * apart + place, mask=mask, other=0.0).to(gl.float32)
        if BIAS == "columns":
            total += gl.load(bias + j.to(gl.int64) * bias_step, mask=j < n, other=0.0).to(gl.float32)[None, :]
        elif BIAS == "rows":
            at = i
            if FORM == "two_shot":
                at = me * rows_each + i
            total += gl.load(bias + at.to(gl.int64) * bias_step, mask=i < rows, other=0.0).to(gl.float32)[:, None]
        values = total.to(out.dtype.element_ty)
        if FORM == "two_shot":
            whole = me * rows_each + i
            for step in range(SIZE):
                peer = (me + 1 + step) % SIZE
                stride = told_second(row, peer, SIZE) // 8 * 8
                theirs = gl.multiple_of((gl.load(bases + peer) + told(row, peer, SIZE)).to(out.dtype), 16)
                gl.store(theirs + (whole.to(gl.int64)[:, None] * stride + j[None, :]), values, mask=mask)
        elif OUT_WIDE:
            to = i.to(gl.int64)[:, None] * (out_down // 8 * 8) + j[None, :]
            gl.store(gl.multiple_of(out.to(gl.int64).to(out.dtype), 16) + to, values, mask=mask)
        else:
            to = i.to(gl.int64)[:, None] * out_down + j.to(gl.int64)[None, :] * out_right
            gl.store(out + to, values, mask=mask)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def reduce_product(
    out, a, b, bias, control, slots, bases, me, rank, m, n, k, a_down, b_down, out_down, out_right, bias_step,
    rows_each, tiles_n, k_tiles, timeout_ns, status,
    SIZE: gl.constexpr, FORM: gl.constexpr, BIAS: gl.constexpr, OUT_WIDE: gl.constexpr, TURNED_A: gl.constexpr,
    TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Add up A @ B over the members.

    Meetings: peers may be written to; the slots are full; with "two_shot" also: the outputs are complete.

    Args (beside those of `push_product`):
        out: with FORM "two_shot", peers write to it, and its rows are dense and aligned.
        bias: or None; see BIAS.
        slots: symmetric memory for SIZE matrices of rows_each x n elements, of the output's type.
        n: a multiple of 8.
        out_down, out_right, bias_step: strides in elements.
        rows_each: rows that a member owns, a multiple of BLOCK_M; the last members may own fewer, or none.
        FORM: "rows": `out` has the own rows; "two_shot": all outputs get them, at their place.
        BIAS: what the bias lies along: "columns", "rows" (those of `out`) or "none".
        OUT_WIDE: with FORM "rows", the rows of `out` are dense and begin at multiples of 16 bytes.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    if FORM == "two_shot":
        nothing = members_of(SIZE).to(gl.int64) * 0
        tell(row, bases, me, nothing + (out.to(gl.int64) - gl.load(bases + me)), nothing + out_down, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    own = gl.load(bases + me)
    mine = slots.to(gl.int64) - own + gl.cast(me, gl.int64) * rows_each * n * 2
    matrices = ()
    for i in gl.static_range(SIZE):
        address = gl.load(bases + i) + mine
        part = _matrix(address, out, rows_each, n, gl.cast(n, gl.int64), BLOCK_M, BLOCK_N // PARTS)
        matrices = matrices + (part,)  # noqa: RUF005
    tiles_each = rows_each // BLOCK_M
    per_owner = tiles_each * tiles_n
    order = OwnersInTurn(tiles_each, tiles_n, (me + 1) % SIZE * per_owner, GROUP, SIZE)
    multiply_tiles(
        _operand(a, m, k, a_down, BLOCK_M, BLOCK_K, TURNED_A), _operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        order, OwnersSlot(matrices, rows_each), per_owner * SIZE, k_tiles, STAGES, PARTS, NUM_WARPS, 0, TURNED_A,
        TURNED_B,
    )  # fmt: skip
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    rows = gl.minimum(m - me * rows_each, rows_each)
    programs = gl.num_programs(0)
    begin = me * per_owner
    number = begin + (gl.program_id(0) - begin % programs + programs) % programs
    while number < begin + per_owner:
        down, right = order.numbered(number)
        _add_up(
            out, bias, slots, row, bases, me, (down - me * tiles_each) * BLOCK_M, right * BLOCK_N, rows, m, n,
            rows_each, out_down, out_right, bias_step, SIZE, FORM, BIAS, OUT_WIDE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        number += programs
    if FORM == "two_shot":
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@gluon.jit
def _fetch(
    gathered, flags, generation, control, bases, me, rank, rows_each, k, timeout_ns, status,
    SIZE: gl.constexpr, FETCHERS: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """Copy the rows of the others, block by block."""
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    blocks = rows_each // BLOCK_M
    for number in range(gl.program_id(0), (SIZE - 1) * blocks, FETCHERS):
        member = (me + 1 + number // blocks) % SIZE
        block = member * blocks + number % blocks
        here = gathered + gl.cast(block, gl.int64) * BLOCK_M * k
        get_bulk(here, here, BLOCK_M * k, me, member, bases, 16384, 4)
        set_flag(flags + block, generation, "release", "gpu")
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@gluon.jit
def _multiply_shards(
    out, b, bias, gathered, flags, generation, tiles_per_flag, me, rank, n, k, b_down, out_down, bias_step, rows_each,
    tiles_n, k_tiles, timeout_ns, status,
    SIZE: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr,
    ASIDE: gl.constexpr, SCOPE: gl.constexpr
):  # fmt: skip
    """Multiply the rows of all members with B, each when its flag says that it is there; see `ShardsInTurn`.

    The first ASIDE programs do something else.
    """
    tiles_each = rows_each // BLOCK_M
    order = ShardsInTurn(
        tiles_each, tiles_n, me, flags, generation, tiles_per_flag, gl.cast(timeout_ns, gl.int64),
        gl.cast(status, gl.int64), rank, GROUP, SIZE, SCOPE,
    )  # fmt: skip
    rows = rows_each * SIZE
    sink = StoreTile(_matrix(out.to(gl.int64), out, rows, n, gl.cast(out_down, gl.int64), BLOCK_M, BLOCK_N // PARTS))
    multiply_tiles(
        _operand(gathered, rows, k, k, BLOCK_M, BLOCK_K, False), _operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        order, _with_bias(sink, bias, bias_step, rows, n, BIAS), tiles_each * SIZE * tiles_n, k_tiles, STAGES, PARTS,
        NUM_WARPS, ASIDE, False, TURNED_B,
    )  # fmt: skip


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def fetch_product(
    out, b, bias, gathered, state, control, bases, me, rank, n, k, b_down, out_down, bias_step, rows_each, tiles_n,
    k_tiles, timeout_ns, status,
    SIZE: gl.constexpr, FETCHERS: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Multiply the rows of all members with B.

    All programs have to be there at the same time: no more than the device has multiprocessors.

    Args (beside those of `push_product`):
        gathered: symmetric memory for SIZE * rows_each rows of k elements; those of this member are there.
        state: int64 words of this plan alone, zero at first: how often each program has run, then the flags.
        rows_each: rows of a member, a multiple of BLOCK_M.
        FETCHERS: programs that copy; the others compute.
        BIAS: what the bias lies along: "columns", "rows" (of the gathered matrix) or "none".
    """
    program = gl.program_id(0)
    generation = gl.load(state + program) + 1
    flags = state + gl.num_programs(0)
    if program < FETCHERS:
        _fetch(
            gathered, flags, generation, control, bases, me, rank, rows_each, k, timeout_ns, status, SIZE, FETCHERS,
            BLOCK_M,
        )  # fmt: skip
    else:
        _multiply_shards(
            out, b, bias, gathered, flags, generation, gl.cast(1, gl.int32), me, rank, n, k, b_down, out_down,
            bias_step, rows_each, tiles_n, k_tiles, timeout_ns, status, SIZE, BIAS, TURNED_B, BLOCK_M, BLOCK_N, BLOCK_K,
            GROUP, STAGES, PARTS, NUM_WARPS, FETCHERS, "gpu",
        )  # fmt: skip
    gl.store(state + program, generation)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def await_product(
    out, b, bias, gathered, flags, me, rank, n, k, b_down, out_down, bias_step, rows_each, tiles_n, k_tiles, timeout_ns,
    status,
    SIZE: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Multiply the rows of all members with B, each member's when they are there.  No program waits for another one.

    Args (beside those of `fetch_product`):
        flags: int32[SIZE]: 1 when a member's rows are there.  The own ones are.
    """
    _multiply_shards(
        out, b, bias, gathered, flags, gl.cast(1, gl.int32), rows_each // BLOCK_M, me, rank, n, k, b_down, out_down,
        bias_step, rows_each, tiles_n, k_tiles, timeout_ns, status, SIZE, BIAS, TURNED_B, BLOCK_M, BLOCK_N, BLOCK_K,
        GROUP, STAGES, PARTS, NUM_WARPS, 0, "sys",
    )  # fmt: skip
