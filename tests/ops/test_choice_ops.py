"""Configs, workspaces, measured tables, and which algorithm is chosen."""

import contextlib
from dataclasses import replace

import pytest
import torch
from tables import raises

from iris_core.dispatch.choice import Chooser, Tables, place_of
from iris_core.dispatch.products import FusedCall, float32_products, torch_allows_tf32
from iris_core.dispatch.requests import Here
from iris_core.dispatch.tables import Entry, write_table
from iris_core.dispatch.team import Host
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.ops import FusedConfig
from iris_core.providers.baseline import Unfused
from iris_core.providers.model import product_s
from iris_core.tuning.samples import FusedSample
from iris_core.types import DeviceTarget, DeviceType, FusedRequest
from iris_triton.gemm import operations
from iris_triton.gemm.parts.fused import tiling
from iris_triton.rocm_iris.configs import FusedConfig as ScriptsConfig

CPU = DeviceTarget(DeviceType.CPU)
H200 = DeviceTarget(DeviceType.CUDA, 0, "sm_90")
AMD = DeviceTarget(DeviceType.HIP, 0, "gfx942", 64)
REQUEST = FusedRequest(
    op="matmul_reduce_scatter", m=8192, n=8192, k=3584, dtype="bfloat16", out_dtype="bfloat16", nbytes=8192 * 8192 * 2,
    rank=0, members=tuple(range(8)), target=H200, a_stride=(3584, 1), b_stride=(8192, 1), out_stride=(8192, 1),
    out_shape=(1024, 8192), bias_stride=None, reach_a=True, reach_out=True, aligned=(True, True, True, True),
    options={"layout": "torch", "bias": "none", "config": {}, "tf32": False},
)  # fmt: skip


def test_a_config_names_an_algorithm_of_one_operation_and_what_is_given_counts():
    config = FusedConfig(block_size_m=128, all_reduce_variant="one_shot", group_size_m=1)
    assert config.named("matmul_all_reduce") == ("one_shot", "all_reduce_variant")
    assert config.given() == {"block_size_m": 128, "group_size_m": 1}
    of_amds = tiling(replace(REQUEST, options={**REQUEST.options, "layout": "tiles"}), 8192, 3584)
    assert (of_amds.block_m, of_amds.block_n, of_amds.constants["GROUP"]) == (256, 64, 1)
    assert ScriptsConfig(block_size_m=128, group_size_m=1).given() == {"block_size_m": 128}  # AMD's default is 1
    with raises(ArgumentError, name="all_gather_matmul"):
        config.named("all_gather_matmul")


def measured(**fields):
    row = {
        "op": "matmul_reduce_scatter", "dtype": "bfloat16", "size": LARGE, "algorithm": "push", "seconds": 7e-4,
        "config": {"num_sms": 120}, "group_size": 8,
    }  # fmt: skip
    return Entry(**{**row, **fields})


LARGE = (8192, 8192, 3584)


def test_the_nearest_shape(tmp_path):
    rows = [
        measured(),
        measured(algorithm="unfused", seconds=9e-4, config={}),
        measured(size=(2048, 8192, 3584), algorithm="unfused", seconds=2e-4),
        measured(op="all_gather_matmul", gather_dim=0, algorithm="fetch"),
        measured(dtype="float8_e4m3fn blocks", algorithm="two_shot"),
    ]
    write_table(tmp_path / "a.json", "GPU", 8, [], rows)
    known = Tables(tmp_path, [], "GPU")

    def names(request, is_near, has_config):
        found = known.nearest(request)
        assert (found.is_near, bool(found.entries and found.entries[0].config)) == (is_near, has_config)
        return [entry.algorithm for entry in found.entries]

    assert names(REQUEST, True, True) == ["push", "unfused"]
    assert names(replace(REQUEST, m=11000, n=6000, k=5000), True, True) == ["push", "unfused"]  # near in each size
    for octaves, *of_point in ((0.49, True, True), (0.51, False, True), (1, False, True), (1.01, False, False)):
        assert names(replace(REQUEST, m=int(8192 * 2**octaves)), *of_point) == ["push", "unfused"]
    assert names(replace(REQUEST, m=3000), False, True) == ["unfused"]
    assert names(replace(REQUEST, m=256), False, False) == ["unfused"]
    assert names(replace(REQUEST, m=255), False, False) == []  # three powers of two, and a bit, from the nearest
    scaled = replace(REQUEST, dtype="float8_e4m3fn", scales="blocks", m=9000)
    assert names(scaled, True, True) == ["two_shot"]
    assert names(replace(scaled, k=3600), False, True) == ["two_shot"]  # which torch may not multiply
    gathers = replace(REQUEST, op="all_gather_matmul", options={**REQUEST.options, "gather_dim": 0})
    assert names(gathers, True, True) == ["fetch"]
    assert names(replace(gathers, reach_a=False), False, True) == ["fetch"]
    assert names(replace(gathers, options={**gathers.options, "gather_dim": 1}), False, False) == []
    assert place_of(replace(gathers, reach_out=False)) == place_of(replace(REQUEST, reach_out=False)) == "heap"
    assert place_of(replace(REQUEST, op="matmul_all_reduce", reach_out=False)) == "ordinary"


def test_times_do_not_choose_where_bits_are_promised(tmp_path):
    known = [Unfused(REQUEST.op) for _ in range(3)]
    for number, each in enumerate(known):
        each.name, each.cost = f"number {number}", lambda request, seconds=5.0 - number: seconds
        each.deterministic = number > 0
    write_table(tmp_path / "gpu-8.json", "gpu", 8, [], [Entry(REQUEST.op, "*", REQUEST.shape, "number 2", 1e-9)])
    choice = Chooser(known, Tables(tmp_path, [], "gpu"), (), deterministic=True)
    assert choice.choose(REQUEST, None).name == known[1].name
    assert choice.contenders(REQUEST, None, few=False) == []  # nothing is measured


def test_scales_go_to_who_takes_them(tmp_path):
    known = [Unfused(REQUEST.op) for _ in range(2)]
    known[0].scaled, known[1].name = ("rows",), "other"
    choice, scaled = Chooser(known, Tables(tmp_path, [], "gpu"), ()), replace(REQUEST, dtype="float8_e4m3fn")
    assert choice.choose(replace(scaled, scales="rows"), None).name == known[0].name
    assert choice.choose(replace(scaled, scales="blocks"), None).name == known[1].name
    with raises(UnsupportedError, "config.scales"):
        choice.choose(replace(scaled, scales="blocks"), FusedConfig(algorithm="unfused"))


def test_algorithms_say_what_they_cannot():
    by_name = {(each.op, each.name): each for each in operations()}
    push = by_name["matmul_reduce_scatter", "push"]
    assert push.supports(REQUEST)
    assert push.supports(replace(REQUEST, dtype="float8_e4m3fn"))
    for request, text in (
        (replace(REQUEST, members=(3,)), "single"),
        (replace(REQUEST, dtype="float8_e4m3fnuz"), "float8_e4m3fnuz"),
        (replace(REQUEST, dtype="float8_e5m2", target=AMD), "gfx942"),
        (replace(REQUEST, options={**REQUEST.options, "config": {"num_fetch_sms": 3}}), "num_fetch_sms"),
        (replace(REQUEST, options={**REQUEST.options, "config": {"num_warps": 3}}), "power"),
    ):
        assert text in push.supports(request).reason
    for each in by_name.values():
        options = {**REQUEST.options, "gather_dim": 0}
        small, large = (replace(REQUEST, op=each.op, n=n, nbytes=n << 14, options=options) for n in (1024, 8192))
        assert 0 < each.cost(small) < each.cost(large)


@pytest.mark.parametrize(("m", "form"), [(1, "sum"), (2, "sum"), (9, "two"), (16, "two")])
def test_two_hops_where_they_save_bytes(m, form):
    """Not where few of the 8 members own a row, and these send it to all."""
    request = replace(REQUEST, op="matmul_all_reduce", m=m, n=1 << 16)
    assert next(each for each in operations() if each.name == "packets")._form(request) == form


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize("m", [1, 32, 128])
def test_each_thread_has_packets_of_its_own(dtype, columns, m):
    """Where two send the same one, the second may come when the first was received, and stays for another call."""
    algorithm = next(each for each in operations() if (each.op, each.name) == (REQUEST.op, "packets"))
    packets = max(16, m) * columns * getattr(torch, dtype).itemsize // 16
    for config in ({}, {"num_warps": 2}, {"num_warps": 8}, {"num_warps": 32}):
        options = {**REQUEST.options, "config": {"block_size_n": columns, **config}}
        request = replace(REQUEST, m=m, dtype=dtype, out_dtype=dtype, options=options, processors=132)
        if algorithm.supports(request):
            assert 32 * algorithm._tiling(request).options["num_warps"] <= packets
        else:
            assert 32 * config["num_warps"] > packets


@pytest.mark.parametrize("inherited", [False, True])
def test_the_precision_of_one_call(inherited, tmp_path):
    """torch's setting counts where the config says nothing, and is the same after a call that wants another one."""
    setting = torch.backends.cuda.matmul
    a, b, out = torch.ones(8, 4), torch.ones(4, 4), torch.ones(8, 4)

    def allowed(dtype=torch.float32, target=H200, wish=None):
        tensors = *(each.to(dtype) for each in (out, a, b)), None
        config = FusedConfig(allow_tf32=wish)
        call = FusedCall("matmul_all_reduce", tensors, None, config)
        return call.describe(Here(0, 2, target, (0, 0)), (0, 1)).options["tf32"]

    try:
        setting.fp32_precision = "none"
        assert not torch_allows_tf32()
        assert (allowed(), allowed(wish=True)) == (False, True)
        if inherited:
            torch.backends.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        assert torch_allows_tf32()
        assert (allowed(), allowed(wish=False)) == (True, False)
        assert not allowed(torch.bfloat16)
        assert not allowed(target=CPU)
        with float32_products(True):
            assert setting.fp32_precision == "tf32"
        with contextlib.suppress(ZeroDivisionError), float32_products(False):
            assert setting.fp32_precision == "ieee"
            raise ZeroDivisionError
        assert setting.fp32_precision == "tf32"
        torch.backends.fp32_precision = "ieee"  # it is inherited again, or still torch's own
        assert torch_allows_tf32() is not inherited
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        setting.fp32_precision = "none"
    assert REQUEST.options["tf32"] is False
    tables = Tables(tmp_path, [], "GPU")
    for dtype, algorithm in (("tf32", "push"), ("float32", "unfused")):
        tables.add([measured(dtype=dtype, algorithm=algorithm)], write=False)
    found = replace(REQUEST, dtype="float32")
    faster = replace(found, options={**REQUEST.options, "tf32": True})
    for request, name in ((found, "unfused"), (faster, "push")):
        assert [entry.algorithm for entry in tables.nearest(request).entries] == [name]
    assert product_s(faster) < product_s(found)
    precisions = [tiling(replace(faster, target=each), 1024, 64).constants["PRECISION"] for each in (H200, AMD)]
    assert precisions == ["tf32", "ieee"]


def test_a_region_without_room_to_spare():
    class Team:
        members, exhausted, asked, warned, spans_nodes = (0, 1), {}, [], set(), False

        def warn_once(self, what, reason):
            self.warned.add(what)

        def region(self, name, size, fill):
            self.asked.append(size >> 20)
            if size > 50 << 20:
                raise UnsupportedError("no room")
            return size

    host, team = Host(None, Team(), {}, 1), Team
    assert [host.symmetric(33 << 20) for _ in range(2)] == [48 << 20] * 2
    assert team.asked == [64, 48, 48]  # what there was no room for is not asked for again
    assert not team.warned
    assert host.symmetric(60 << 20) is None
    assert len(team.warned) == 1
    assert host.symmetric(20 << 20) == 32 << 20
    assert team.asked[3:] == [32]


def test_calls_that_take_the_host_longer_than_the_device(tmp_path):
    """Tables have the device's times and the CPU's: outside of graphs a call takes the longer one."""
    offered = [each for _ in range(2) for each in operations() if each.name == "fetch"]
    offered[0].name = "host_bound"
    points = ((512, 7168, 4096), {"host_bound": 50, "fetch": 60}), (LARGE, {"host_bound": 600, "fetch": 700})
    how, host = {"op": "all_gather_matmul", "gather_dim": 0, "config": {}}, {"host_bound": 3e-4, "fetch": 1e-5}
    rows = [
        measured(size=size, algorithm=name, seconds=us * 1e-6, host_seconds=host[name], **how)
        for size, times in points
        for name, us in times.items()
    ]
    write_table(tmp_path / "table.json", "GPU", 8, [], rows)
    chooser = Chooser(offered, Tables(tmp_path, [], "GPU"), ())
    options = {**REQUEST.options, "gather_dim": 0}
    gathers = replace(REQUEST, op="all_gather_matmul", options=options, processors=132)
    for (m, n, k), name, in_graphs in (((512, 7168, 4096), "fetch", ("host_bound", {})), (LARGE, "host_bound", None)):
        m, n, k = FusedSample.of_layer("all_gather_matmul", 0, torch.bfloat16, 0, 8, (m, n * 8, k)).shape
        request = replace(gathers, m=m, n=n, k=k)
        choice = chooser.choose(request, None)
        assert (choice.name, choice.in_graphs) == (name, in_graphs)
        said = str(chooser.explain(request, None))
        assert ("300.0 us" in said, "; in graphs host_bound\n" in said) == (name == "fetch",) * 2
