"""Bulk copies: the copy unit of a multiprocessor (NVIDIA's TMA) moves memory to and from peers through shared memory.

A plain `put` keeps every thread of a program busy with loads and stores; a bulk copy is begun by one thread, and one
warp keeps a link busy.  They need Hopper or newer: `supports_bulk` says whether a kernel's target has them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.target_info import cuda_capability_geq, is_cuda, is_hip

from iris_gluon._compat import barrier, tma_load, tma_store
from iris_gluon.layouts import default_layout
from iris_triton.interpreter.entries import cpu_entry, cpu_entry_at
from iris_triton.language.address import translate

_ROW_BYTES = gl.constexpr(128)  # of a row of described memory: one line of the widest swizzle
_WORDS = gl.constexpr(32)  # int32 in a row
_ALIGNMENT = gl.constexpr(16)  # bytes of which addresses must be multiples
_PLAIN_BLOCK = gl.constexpr(1024)


@gluon.constexpr_function
def supports_bulk():
    """Whether the target that a kernel is compiled for has bulk copies; the CPU executor computes them."""
    return cuda_capability_geq(9, 0) if is_cuda() else not is_hip()


@gluon.constexpr_function
def _per_row(element_type):
    """Elements of a row; a bool is stored as a byte."""
    return _ROW_BYTES.value * 8 // max(8, element_type.primitive_bitwidth)


@gluon.jit
def await_bulk_stores():
    """Wait until every copy from shared to global memory that this program has begun is complete.

    `tma.store_wait` only waits until shared memory has been read.  Afterwards a `signal` hands the data over.
    """
    if is_cuda():
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        barrier()  # the thread that has begun the copies has waited; the others now have, too


@gluon.jit
def fence_async_global(WHOLE_PROGRAM: gl.constexpr = True):
    """Order global memory accesses before later TMA accesses: a proxy fence.

    TMA accesses memory through the async proxy, which neither `wait` nor a barrier orders.  Call this between a `wait`
    and TMA loads of the data that was waited for, and between ordinary stores and TMA accesses to the same memory; use
    `await_bulk_stores` between TMA stores and a `signal`.  Does nothing where there is no TMA.

    Args:
        WHOLE_PROGRAM: fence the stores and acquires of all threads, with a barrier before and after.  False: only the
            calling threads', as in a partition of one warp that has waited by itself.

    Example:
        ctx.wait(flag, 1)
        bulk.fence_async_global()
        tma.async_copy_global_to_shared(descriptor, [0, 0], bar, tile)
    """
    if is_cuda():
        if WHOLE_PROGRAM:
            barrier()
        gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        if WHOLE_PROGRAM:
            barrier()


@gluon.jit
def _begin_load(rows, chunk, stages, full, STAGES: gl.constexpr):
    ROWS: gl.constexpr = rows.block_type.shape[0]
    stage = chunk % STAGES
    mbarrier.expect(full.index(stage), rows.block_type.nbytes)
    tma_load(rows, [chunk * ROWS, 0], full.index(stage), stages.index(stage))


@gluon.jit
def _copy_rows(source, target, rows, CHUNK_BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Copy whole rows of `_ROW_BYTES`; both addresses are multiples of `_ALIGNMENT`.  At least one row."""
    ROWS: gl.constexpr = CHUNK_BYTES // _ROW_BYTES
    AHEAD: gl.constexpr = STAGES - 1  # what hides the latency of reading; the last stage is on its way out
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, _WORDS], gl.int32)
    stages = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, _WORDS], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    there = tma.make_tensor_descriptor(source, [rows, _WORDS], [_WORDS, 1], [ROWS, _WORDS], layout)
    here = tma.make_tensor_descriptor(target, [rows, _WORDS], [_WORDS, 1], [ROWS, _WORDS], layout)
    chunks = gl.cdiv(rows, ROWS)
    for chunk in range(gl.minimum(chunks, AHEAD)):
        _begin_load(there, chunk, stages, full, STAGES)
    for chunk in range(chunks):
        mbarrier.wait(full.index(chunk % STAGES), (chunk // STAGES) & 1)
        tma_store(here, [chunk * ROWS, 0], stages.index(chunk % STAGES))
        if chunk + AHEAD < chunks:
            tma.store_wait(1)  # the chunk before this one has been read: its stage is the next one to fill
            _begin_load(there, chunk + AHEAD, stages, full, STAGES)
    await_bulk_stores()
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(stage))


@gluon.jit
def _copy_plainly(source, target, first, end):
    """Copy the elements first .. end - 1 by loads and stores."""
    lanes = gl.arange(0, _PLAIN_BLOCK, layout=default_layout([_PLAIN_BLOCK]))
    for start in range(first, end, _PLAIN_BLOCK):
        i = start + lanes
        gl.store(target + i, gl.load(source + i, mask=i < end), mask=i < end)


@gluon.jit
def _copy(source, target, numel, CHUNK_BYTES: gl.constexpr, STAGES: gl.constexpr):
    gl.static_assert(supports_bulk(), "bulk copies need NVIDIA Hopper or newer (sm_90): use put or get on this target")
    blocks: gl.constexpr = source.type.is_block() or target.type.is_block()
    gl.static_assert(not blocks, "a bulk copy needs two pointers, no blocks of pointers")
    gl.static_assert(source.dtype == target.dtype, "a bulk copy needs pointers to the same type")
    chunk: gl.constexpr = CHUNK_BYTES >= 1024 and CHUNK_BYTES <= 32768 and CHUNK_BYTES & (CHUNK_BYTES - 1) == 0
    gl.static_assert(chunk, "CHUNK_BYTES must be a power of 2 from 1024 to 32768")
    gl.static_assert(STAGES >= 2, "a bulk copy needs two stages or more")
    gl.device_assert(numel >= 0, "a bulk copy of less than no elements")
    PER_ROW: gl.constexpr = _per_row(source.dtype.element_ty)
    rows = (gl.cast(numel, gl.int64) // PER_ROW).to(gl.int32)
    if (gl.cast(source, gl.int64) | gl.cast(target, gl.int64)) % _ALIGNMENT != 0:
        rows = rows * 0
    if rows > 0:
        fence_async_global()
        words: gl.constexpr = gl.pointer_type(gl.int32)
        _copy_rows(source.to(words, bitcast=True), target.to(words, bitcast=True), rows, CHUNK_BYTES, STAGES)
    _copy_plainly(source, target, gl.cast(rows, gl.int64) * PER_ROW, gl.cast(numel, gl.int64))


@gluon.jit
def put_bulk(
    from_ptr, to_ptr, numel, from_rank, to_rank, heap_bases, CHUNK_BYTES: gl.constexpr = 16384,
    STAGES: gl.constexpr = 4
):  # fmt: skip
    """Copy consecutive elements from the caller's own memory to to_rank's memory; returns when they are there.

    The calling program copies all of them; give each program its piece.  A program of one warp is enough.  The bytes
    after the last multiple of 128 are copied by loads and stores, and so are all bytes if either address is not a
    multiple of 16.  A later `signal` releases the data.  Synchronises the threads of the program, so it must not be
    called from divergent code; branches on scalars are fine.

    TMA needs descriptors of both sides in global memory, which Triton gets from an allocator at the launch: opening an
    `Iris` sets one, for the thread that opens it; elsewhere call `triton.set_allocator`.

    Args:
        from_ptr: any address that the caller may read (scalar pointer).
        to_ptr: address in the heap of from_rank, the caller (scalar pointer to the same type).
        numel: number of elements; less than 0 is an assertion on the CPU, and on GPUs with debug=True.
        to_rank, heap_bases: rank whose memory is written, int64[world_size].
        CHUNK_BYTES: bytes per chunk, a power of 2 from 1024 to 32768.
        STAGES: chunks in shared memory, one of them being stored, the others being loaded.

    Raises:
        CompilationError: the target has no bulk copies; see `supports_bulk`.
    """
    _copy(from_ptr, translate(to_ptr, from_rank, to_rank, heap_bases), numel, CHUNK_BYTES, STAGES)


@gluon.jit
def get_bulk(
    from_ptr, to_ptr, numel, from_rank, to_rank, heap_bases, CHUNK_BYTES: gl.constexpr = 16384,
    STAGES: gl.constexpr = 4
):  # fmt: skip
    """Copy consecutive elements from to_rank's memory to the caller's own memory; returns when they are there.

    The rules and arguments of `put_bulk` hold here, too, but `from_ptr` is the address in the heap of from_rank, the
    caller, and `to_ptr` any address that the caller may write.
    """
    _copy(translate(from_ptr, from_rank, to_rank, heap_bases), to_ptr, numel, CHUNK_BYTES, STAGES)


@gluon.jit
def peer_descriptor(
    pointer, from_rank, to_rank, heap_bases, shape, strides, block_shape: gl.constexpr, layout: gl.constexpr
):
    """Return a tensor descriptor of a matrix in to_rank's heap, for copies by TMA.

    Args:
        pointer: the matrix in the heap of from_rank, the caller (scalar pointer, a multiple of 16 bytes).
        to_rank, heap_bases: rank whose memory is described, int64[world_size].
        shape, strides: of the matrix; strides in elements, multiples of 16 bytes, the last one 1.
        block_shape: what one copy moves.
        layout: gl.NVMMASharedLayout of such a block in shared memory.
    """
    target = translate(pointer, from_rank, to_rank, heap_bases)
    return tma.make_tensor_descriptor(target, shape, strides, block_shape, layout)


cpu_entry(fence_async_global)(lambda program, WHOLE_PROGRAM=True: None)  # the CPU has one kind of access
cpu_entry_at(await_bulk_stores, "iris_gluon.interpreter.cta:complete_stores")
