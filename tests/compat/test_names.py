"""Names, parameter orders, defaults and error texts of AMD's Iris, one row each.

A row that fails says what a script there would miss.
"""

import inspect
import io
import re

import pytest
import torch  # noqa: F401 - rows name it
from jobs_common import environment
from tables import raises, table

import iris_gluon  # noqa: F401 - a row of CALLS names it
import iris_triton as iris
from iris_core.errors import UnsupportedError
from iris_core.heap import tensors
from iris_triton.rocm_iris import ported_context  # noqa: F401 - a question asks it

# Beside those that the tables below and the scripts use.
NAMES = {
    "iris": "AllReduceConfig store atomic_cas atomic_xchg atomic_xor atomic_and atomic_min",
    "iris.ccl": "AllReduceWorkspace",
    "iris.x": "Tile TileView TensorView AllReduceConfig make_tensor_view tile_layout tile_ptr offset_ptr"
    " compute_tile_indices compute_tile_offsets DeviceContext",
    "iris.gluon": "GluonDeviceTracing",
    "iris.bench": "linear_range",
    "ctx.heap": "on_symmetric_heap refresh_peer_access close",
    "ctx.tracing": "reset",
    "iris.bench.State": "get set_flops set_warmup set_repeat",
}
_ATOMICS = "add sub cas xchg xor and or min max"
_EVENTS = ["load", "store", "get", "put", "copy", *(f"atomic_{name}" for name in _ATOMICS.split())]
EVENTS = {name: number for number, name in enumerate(_EVENTS)}
EVENTS |= {"fetch": 1024, "compute": 2048, "reduce": 2049, "wait": 3072, "barrier": 3073}
_ANY = "any default"


@pytest.fixture(scope="module")
def ctx():
    """A world of one on the CPU, opened as a script there opens it."""
    with environment(IRIS_DEVICE="cpu"):
        shmem = iris.iris(1 << 20)
    yield shmem
    shmem.close()


@table(("holder", "name"), [(holder, name) for holder, names in NAMES.items() for name in names.split()])
def test_there_is(ctx, holder, name):
    getattr(eval(holder), name)
    assert holder != "iris" or name in dir(iris)


RANDOM = "*args, generator=None, out=None, dtype=None, layout=torch.strided, device=None, requires_grad=False"
MADE = "out=None, dtype=None, layout=torch.strided, device=None, requires_grad=False"
MEMBERS = "group=None, async_op=False, config=None"
KERNEL_MOVE = "mask other load_cache_modifier store_cache_modifier"
FUSED = "async_op=False, config=None, workspace=None"
COLLECTIVES = {
    "all_gather": MEMBERS, "all_to_all": MEMBERS, "reduce_scatter": f"op=None, {MEMBERS}",
    "all_reduce": f"op=None, {MEMBERS}, workspace=None", "all_reduce_preamble": "config=None, workspace=None",
}  # fmt: skip
CALLS = {
    "iris.iris": "heap_size, allocator_type, engines=()", "iris.Iris": "heap_size, allocator_type, engines=()",
    "iris.do_bench": "fn, barrier_fn, preamble_fn, n_warmup=25, n_repeat=100, quantiles=None, return_mode='mean'",
    "iris.tensor_from_ptr": "ptr, size_bytes, dtype, device, shape", "iris.set_logger_level": "level",
    "iris.CUDAArrayInterface": "ptr, size_bytes, dtype, device, shape",
    "ctx.zeros": f"*args, {MADE}", "ctx.ones": f"*args, {MADE}", "ctx.full": f"size, fill_value, *, {MADE}",
    "ctx.empty": f"*args, {MADE}, pin_memory=False, memory_format=torch.contiguous_format",
    "ctx.zeros_like":
        "input, *, dtype=None, layout, device=None, requires_grad=False, memory_format=torch.preserve_format",
    "ctx.arange": f"start, end=None, step=1, *, {MADE}", "ctx.uniform": "size, low=0.0, high=1.0, dtype",
    "ctx.linspace":
        "start, end, steps, out=None, *, dtype=None, layout=torch.strided, device=None, requires_grad=False",
    "ctx.rand": f"{RANDOM}, pin_memory=False", "ctx.randn": f"{RANDOM}, pin_memory=False", "ctx.randint": RANDOM,
    "ctx.broadcast": "value, src=0, *, source_rank=None, src_rank=None", "ctx.barrier": "stream=None, group=None",
    "ctx.device_barrier": "group=None", "ctx.allocate_symmetric": "*size, dtype=None", "ctx.as_symmetric": "external",
    "ctx.is_symmetric": "tensor", "ctx.heap.translate": "ptr, from_rank, to_rank",
    "ctx.heap.allocate": "num_elements, dtype, alignment", "iris.ccl.extract_group_info": "group, ctx",
    **{f"ctx.ccl.{name}": f"output, input, {more}" for name, more in COLLECTIVES.items()},
    **{f"iris.ccl.{name.removesuffix('_preamble')}.{name}": f"output, input, ctx, {more}"
       for name, more in COLLECTIVES.items()},
    **{f"ctx.ops.{name}": f"output, A, B, bias=None, {FUSED}"
       for name in ("matmul_all_reduce", "all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter")},
    "iris.ops.matmul_all_reduce": f"shmem, output_tensor, A, B, {FUSED}",
    "iris.ops.all_gather_matmul": f"shmem, output_tensor, A_sharded, B, bias=None, {FUSED}",
    "iris.ops.matmul_all_gather": f"shmem, output_tensor, A, B, bias=None, {FUSED}",
    "iris.ops.matmul_reduce_scatter": f"shmem, output_tensor, A, B, {FUSED}",
    "iris.ops.all_gather_matmul_hbm_buffer": "ctx, output_tensor, A_sharded, B, bias, async_op, config, workspace,"
    " num_fetch_sms, k_per_flag, fetch_block_m, fetch_block_k, staged_a_layout='k_contiguous', num_warps, num_stages,"
    " num_fetch_stages, first_stage_fetch_sms, trace=False",
    "iris.ops.matmul_all_reduce_preamble": "shmem, C, A, B, config, workspace",
    "iris.ops.matmul_reduce_scatter_preamble": "shmem, C, A, B, config, workspace",
    "iris.ops.all_gather_matmul_preamble": "shmem, A_sharded, B, config",
    "iris.ops.matmul_all_gather_preamble": "shmem, A, B, config",
    "iris.ops.all_gather_matmul_hbm_buffer_preamble": "ctx, A_sharded, B, config, k_per_flag, staged_a_layout",
    "iris.ops.FusedConfig().validate": "world_size=None", "iris.bench.main": "argv=None",
    "iris.ops.FusedWorkspace().matches": "operation, shape, dtype, world_size, variant=''",
    "iris.bench.register": "function", "iris.bench.axis": "name, values",
    "iris.bench.State.exec": "self, fn, preamble_fn", "iris.bench.State.add_counter": "self, name, value",
    "ctx.tracing.enable": "max_events=1_000_000", "ctx.tracing.export": "filename='trace.json', merge=False",
    "iris.ccl.Config": "*, block_size_m=32, block_size_n=64, swizzle_size=4, comm_sms=64, num_xcds=None,"
    " chunk_size=None, use_gluon=False, all_reduce_distribution=1, all_reduce_num_rings=1,"
    " all_reduce_ring_slice_n=None, num_stages=1, num_warps=4, threads_per_warp=64, waves_per_eu=0",
    "iris.ops.FusedConfig": "*, block_size_m=256, block_size_n=64, block_size_k=64, group_size_m=1, num_sms=None,"
    " num_xcds=1, chunk_size=1, cache_modifier_a='.ca', cache_modifier_b='.ca', all_reduce_num_rings=1",
    # in kernels
    "iris_gluon.IrisDeviceCtx.initialize": "context_tensor tracing",
    "iris_gluon.IrisDeviceCtx.load": "self pointer from_rank mask other cache_modifier volatile",
    "iris_gluon.IrisDeviceCtx.store": "self pointer value to_rank mask cache_modifier",
    "iris_gluon.IrisDeviceCtx.get": f"self from_ptr to_ptr from_rank {KERNEL_MOVE}",
    "iris_gluon.IrisDeviceCtx.put": f"self from_ptr to_ptr to_rank {KERNEL_MOVE}",
    "iris_gluon.IrisDeviceCtx.copy": f"self src_ptr dst_ptr from_rank to_rank {KERNEL_MOVE}",
    "iris_gluon.IrisDeviceCtx.atomic_cas": "self pointer cmp val to_rank sem scope",
    **{f"iris_gluon.IrisDeviceCtx.atomic_{op}": "self pointer val to_rank mask sem scope"
       for op in ("add", "sub", "xchg", "xor", "and", "or", "min", "max")},
    "iris_gluon.GluonDeviceTracing.record_event_start": "self event_id target_rank address pid_m pid_n mask",
    "iris_gluon.GluonDeviceTracing.record_event_end": "self handle", "iris.quiet": "copy_engine_ctx to_rank",
    "iris.make_tensor_view": "ptr M N stride_m stride_n", "iris.TensorView.tile_ptr": "self tile",
    "iris.TensorView.tile_ptr_from_indices": "self rm rn block_m block_n",
    "iris.TensorView.offset_tile_ptr": "self tile offset_m offset_n src_mask",
    "iris.TensorView.offset": "self offset_m offset_n", "iris.TensorView.number_of_tiles": "self block_m block_n",
    "iris.Tile.layout": "self M N", "iris.Tile.indices": "self", "iris.TileView.layout": "self M N",
    "iris.x.all_reduce_atomic": "tile dst_view ctx", "iris.x.all_reduce_spinlock": "tile dst_view locks ctx",
    "iris.x.all_reduce_one_shot": "tile src_view dst_view locks ctx",
    "iris.x.all_reduce_two_shot": "tile src_view dst_view locks start_tile stride ctx",
    "iris.x.all_reduce_ring": "tile src_view dst_view ctx", "iris.x.all_gather": "tile dst_view dim ctx",
    "iris.x.gather": "tile src_view source_rank ctx hint", "iris.x.all_to_all": "tile src_view dst_view N_per_rank ctx",
    "iris.x.reduce_scatter": "tile src_view dst_view locks ctx",
    "iris.x.chiplet_transform_chunked": "pid num_workgroups num_xcds chunk_size",
    "iris.DeviceContext.all_reduce": "self tile src_view dst_view config tile_id",
    "iris.DeviceContext.gather": "self tile src_view source_rank hint",
}  # fmt: skip
"""What a name is called with.  Parameters without a default here may have any."""


@table("name", CALLS)
def test_is_called_with(ctx, name):
    ours = _parameters(eval(name))
    given = re.split(r",?\s+", CALLS[name])
    given = [part if "=" in part or part.startswith("*") else f"{part}=_ANY" for part in given]
    theirs = inspect.signature(eval(f"lambda {', '.join(given)}: 0")).parameters
    for place, (parameter, wanted) in enumerate(theirs.items()):
        if wanted.kind is inspect.Parameter.VAR_POSITIONAL:
            assert list(ours.values())[place].kind is wanted.kind
            continue
        if wanted.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert list(ours)[place] == parameter
        if wanted.default is not _ANY and ours[parameter] is not None:
            assert ours[parameter].default == wanted.default, parameter
        assert parameter in ours or wanted.kind is inspect.Parameter.VAR_KEYWORD


def _parameters(function):
    """Parameters by name, also of kernels; None for each option of a factory, whose default is torch's."""
    found = dict(inspect.signature(getattr(function, "fn", function)).parameters)
    options = found.get("options")
    if options is not None and options.kind is inspect.Parameter.VAR_KEYWORD:
        kind = options.annotation.removeprefix("Unpack[").removesuffix("]")
        found |= dict.fromkeys(getattr(tensors, kind).__optional_keys__)
    return found


@table(("field", "value"), [("block_size_m", 0), ("all_gather_variant", "tree")])
def test_configs_are_checked_and_can_be_changed(field, value):
    config = iris.ccl.Config()
    before = hash(config)
    with raises(ValueError, name=field):
        setattr(config, field, value)
    assert (config, hash(config)) == (iris.ccl.Config(), before)
    wanted = iris.ccl.Config(block_size_n=128, all_reduce_ring_slice_n=128)
    config.block_size_n = 128
    config.all_reduce_ring_slice_n = 128
    assert (config, hash(config)) == (wanted, hash(wanted))
    with raises(AttributeError, name="blok"):
        config.blok = 3
    fused = iris.ops.FusedConfig()
    fused.all_reduce_variant = "ring"
    fused.validate(world_size=3)


ANSWERS = {
    "{name: getattr(iris.TraceEvent(), name) for name in EVENTS} == EVENTS": True,
    "[int(iris.ccl.ReduceOp[name]) for name in ('SUM', 'PRODUCT', 'MIN', 'MAX', 'BAND', 'BOR', 'BXOR')]": [*range(7)],
    "(ctx.heap_size, ctx.gpu_id, ctx.get_device_id(), ctx.get_cu_count() > 0)": (1 << 20, 0, 0, True),
    "('host' in ctx.explain(), ctx.get_device_context() is ctx.get_device_context())": (True, True),
    "(ctx.comm, ctx.copy_engines_device_ctx, ctx.get_copy_engine_ctx())": (None, None, None),
    "(str(ctx.get_device()) == ctx.device, ctx.get_device().type)": (True, "cpu"),
    "[make(*()).shape for make in (ctx.zeros, ctx.ones, ctx.empty, ctx.rand, ctx.randn)]": [()] * 5,
    "ctx.zeros(size=(2,)).shape": (2,), "ctx.broadcast('text', source_rank=0)": "text",
    "len(ctx.get_device_context()) >= 2 + 1 + 17": True,
    "[ported_context.allocator_for(name, on_cpu=False) for name in ('torch', 'vmem_chunked', 'ours')]":
        ["torch", "vmem", "ours"],
    "iris.CUDAArrayInterface(4096, 24, torch.float32, 'cuda', (2, 3)).__cuda_array_interface__['shape']": (2, 3),
    "[iris.CUDAArrayInterface(4096, 24, dtype).__cuda_array_interface__['typestr'] for dtype in"
    " (torch.float16, torch.bfloat16, torch.uint8)]": ["<f2", "<i2", "|u1"],
    "ctx.ccl.all_reduce(ctx.zeros(2, 2), ctx.ones(2, 2)).prepared": True,
}  # fmt: skip


@table("question", ANSWERS)
def test_answer(ctx, question):
    assert eval(question) == ANSWERS[question]


ERRORS = [
    ("iris.iris(1 << 20, 'no_such')", ValueError, "'no_such'"), ("iris.set_logger_level('LOUD')", ValueError, "LOUD"),
    ("iris.iris(1 << 20, engines='warp')", ValueError, "'warp'"),
    ("iris.Iris(1 << 20, 'host', allocator='torch')", ValueError, "allocator='torch'"),
    *((call, UnsupportedError, "") for call in (
        "ctx.put(ctx.zeros(1), 0)", "ctx.quiet()", "ctx.put_tile(None, 0, 0, 0)", "ctx.put_tiles([], 0, [], [])",
        "iris.iris(1 << 20, 'host', engines='sdma')")),
    ("ctx.zeros(1 << 20)", MemoryError, ""), ("iris.bench.power_of_two(4, 2)", ValueError, "power_of_two(4, 2)"),
    ("iris.tensor_from_ptr(4096, 8, torch.float32, 'cpu', (3,))", ValueError, "shape (3,)"),
    ("iris.tensor_from_ptr(0, 8, torch.float32, 'cpu', (2,))", ValueError, "address 0"),
    ("ctx.ccl.all_reduce_preamble(ctx.zeros(2, 2), ctx.zeros(3, 2))", ValueError, "all_reduce"),
    ("ctx.ccl.all_reduce(ctx.zeros(2), ctx.zeros(2), workspace=3)", TypeError, "AllReduceWorkspace"),
    ("iris.ops.all_gather_matmul_preamble(ctx, ctx.ones(2, 3), ctx.ones(2, 2))", ValueError, "all_gather_matmul"),
    ("iris.ops.all_gather_matmul_hbm_buffer(ctx, *[ctx.ones(2, 2)] * 3, trace=True)", UnsupportedError, "trace=True"),
    ("ctx.ops.matmul_all_reduce(ctx.zeros(2, 2), output_tensor=1)", TypeError, "'output'"),
]  # fmt: skip


@table(("call", "error", "name"), ERRORS)
def test_error(ctx, call, error, name):
    with raises(error, "heap.out of memory" if error is MemoryError else "names", name=name):
        eval(call)


@pytest.fixture
def log(monkeypatch):
    (handler,) = [each for each in iris.logger.handlers if each.name == iris.logger.name]
    monkeypatch.setattr(handler, "stream", io.StringIO())
    return handler.stream.getvalue


def test_lines_of_the_log(ctx, log):
    iris.set_logger_level(iris.DEBUG)
    try:
        for level in ("debug", "info", "warning", "error"):
            getattr(ctx, level)(f"{level} it is")
    finally:
        iris.set_logger_level(iris.WARNING)
    lines = log().splitlines()
    said = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines]
    assert said == [f"{level.upper()} [Iris] [0/1] {level} it is" for level in ("debug", "info", "warning", "error")]


def test_what_is_asked_for_in_vain_is_said_once(ctx, log):
    config = iris.ops.FusedConfig(all_reduce_variant="spinlock", num_stages=3, block_size_m=16, block_size_n=16)
    out, a, b, square = ctx.zeros(2, 2), ctx.ones(2, 3), ctx.ones(3, 2), ctx.ones(2, 2)
    tunings = {"k_per_flag": 2, "fetch_block_m": 3, "staged_a_layout": "m_contiguous"}
    for _ in range(2):
        ctx.ops.matmul_all_reduce(out, a, b, config=config)
        assert out.tolist() == [[3.0, 3.0]] * 2
        iris.ops.all_gather_matmul_hbm_buffer(ctx, out, square, square, **tunings)
        iris.ops.all_gather_matmul_hbm_buffer_preamble(ctx, square, square, k_per_flag=4)
        assert out.tolist() == [[2.0, 2.0]] * 2
    assert log().count("all_reduce_variant='spinlock'") == 1
    assert log().count("no use for k_per_flag=2, fetch_block_m=3, staged_a_layout='m_contiguous'") == 1
    assert log().count("no use for k") == 1


@pytest.mark.parametrize("name", ["torch", "vmem", "vmem_chunked"])
def test_allocators_of_cpu_ranks(name, log):
    with environment(IRIS_DEVICE="cpu"), iris.iris((1 << 20) + 3, name) as shmem:
        assert iris.is_simulation_env()
        assert (shmem.plugin_names["allocator"], shmem.heap_size) == ("host", (1 << 20) + 3)
    assert log().count(f"allocator_type={name!r}") == 1
