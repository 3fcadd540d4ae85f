"""Algorithms of packets: where they are offered, chosen and launched; the kit on every algorithm."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from ccl_cases import OPS, registered
from emulation import emulation
from tables import table

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.dispatch.choice import Chooser, Tables
from iris_core.dispatch.tables import read_table
from iris_core.protocols import Collective
from iris_core.testing import CollectiveConformance
from iris_core.testing.conformance.collective_jobs import usual
from iris_core.testing.conformance.plugin import member_problems
from iris_core.types import DeviceTarget, DeviceType
from iris_triton import interpreter
from iris_triton.collectives import TABLES, collectives, fast_collectives
from iris_triton.collectives.nvls import Nvls
from iris_triton.collectives.packets import base as fast_algorithms
from iris_triton.collectives.packets import fabric
from iris_triton.collectives.packets.exchange import shape_for
from iris_triton.collectives.packets.packet import spot
from iris_triton.collectives.parts.sizes import layout_of

KB, MB = 1 << 10, 1 << 20
ALGORITHMS = {(each.op, each.name): each for each in fast_collectives()}


@table("size", [2, 3, 4, 8])
@table("nbytes", [KB, 64 * KB, MB, 16 * MB, 64 * MB])
@table(("op", "name"), [key for key in ALGORITHMS if not key[1].endswith("split")])
def test_every_packet_has_a_thread_while_programs_are_left(op, name, size, nbytes):
    count = nbytes // size * size // 2 // (1 if op in ("all_reduce", "reduce", "broadcast") else size)
    target = DeviceTarget(DeviceType.CUDA, 0, "sm_90")
    request = usual(op, dtype="bfloat16", shape=(count,)).request(0, range(size), target)
    request = dataclasses.replace(request, options={**request.options, "aligned": True, "config": {}})
    packets = ALGORITHMS[op, name]._packets(request)
    shape = shape_for(request, packets, *name.split("_", 1))
    programs, warps = shape.programs, shape.options["num_warps"]
    assert 1 <= programs <= 1024
    assert programs * warps * 32 >= min(packets, 1024 * 8 * 32)
    assert (programs - 1) * warps * 32 < packets


def test_alignment_makes_another_kind_of_call():
    """What was compiled for aligned tensors must not be launched with others: on GPUs, it would be a fault."""
    config = Config(algorithm="ll128_one_shot")
    with emulation(), Iris("4MiB", device="cpu") as ctx:
        inp, out = ctx.ones(100, dtype=torch.float32), ctx.zeros(100, dtype=torch.float32)
        for begins, whole in (((0, 0), True), ((4, 8), True), ((1, 0), False), ((0, 2), False), ((3, 3), False)):
            target, source = out[begins[0] :][:64], inp[begins[1] :][:64]
            target.fill_(-1)
            ctx.ccl.all_reduce(target, source, config=config)
            assert torch.equal(target, source)
            plans = [bound.plan for bound in ctx.ccl._bound.values()]
            assert len(plans) == (1 if whole else 2)
            assert plans[-1].kernels[0]._arguments["IN_WHOLE"] is whole


@table(("shape", "stride", "expected"), [
    ((5, 3), (3, 1), True), ((5, 8), (12, 1), True), ((5, 6), (12, 1), False), ((5, 8), (10, 1), False),
    ((5, 8), (16, 2), False), ((1 << 20, 1 << 10), (1 << 12, 1), True), ((1 << 21, 1 << 10), (1 << 12, 1), False),
])  # fmt: skip
def test_runs_of_four_elements(shape, stride, expected):
    assert layout_of(shape, stride).has_runs(4) is expected


@triton.jit(do_not_specialize=["first"])
def spots(offsets, flags, first, ENC: tl.constexpr, BLOCK: tl.constexpr):
    """Where the data of BLOCK packets lies."""
    lanes = tl.arange(0, BLOCK)
    offset, flag = spot(first + lanes, ENC)
    tl.store(offsets + lanes, offset)
    tl.store(flags + lanes, flag)


@table("first", [0, 143165576, 2**31 - 64])
@table("encoding", ["ll", "ll128", "sentinel"])
def test_places_of_packets_in_large_messages(encoding, first):
    """The first of them whose data lies behind 2 GiB, and the last of 32 bits."""
    interpreter.enable()
    offsets, flags = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
    spots[(1,)](offsets, flags, first, ENC=encoding, BLOCK=64)
    numbers = range(first, first + 64)
    if encoding == "ll128":
        assert offsets.tolist() == [each // 8 * 120 + each % 8 * 16 for each in numbers]
        assert flags.tolist() == [each % 8 == 7 for each in numbers]
    else:
        assert offsets.tolist() == [each * (8 if encoding == "ll" else 16) for each in numbers]
        assert not flags.any()


@pytest.mark.parametrize("path", sorted(TABLES.glob("nvidia-h200-*.json")), ids=lambda path: path.stem)
def test_models_come_near_what_was_measured(path, tmp_path, monkeypatch):
    """What they would choose without the table takes at most 1.6 times as long as the best, as far as it is there."""
    monkeypatch.setattr(fast_algorithms, "lines_problem", lambda index: "")
    table, known = read_table(path), Tables(TABLES, [], "NVIDIA H200")
    chooser = Chooser(collectives(), Tables(tmp_path, [], "a GPU"), ())
    compared = 0
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for nbytes in (1 << shift for shift in range(9, 29, 2)):
            call = usual(op, dtype="bfloat16", shape=(nbytes // 2,))
            call = call.request(0, range(table.group_size), DeviceTarget(DeviceType.CUDA))
            call = dataclasses.replace(call, nbytes=nbytes, shape=(nbytes // 2,))
            entries = known.nearest(call).entries
            assert entries[0].source == str(path)
            seconds = {entry.algorithm: entry.seconds for entry in reversed(entries)}
            chosen = chooser.choose(call, None).name
            if chosen in seconds:
                assert seconds[chosen] <= 1.6 * min(seconds.values()), (op, nbytes, chosen, seconds)
                compared += 1
    assert compared > 20


@table(("text", "holds"), [
    (None, False),  # a device that was not probed
    *((json.dumps({"format": 1, "device": "x", "facts": {"whole_lines": {"holds": holds}}}), holds)
      for holds in (True, False)),
    *((text, False) for text in (
        "", "[]", "[" * 100_000, '{"format": 2, "facts": {}}', '{"format": 1, "facts": {"magic": {}}}',
        '{"format": 1, "facts": {"whole_lines": {"holds": "no"}}}', '{"format": 1, "facts": {"whole_lines": 1}}')),
])  # fmt: skip
def test_facts_are_read(tmp_path, monkeypatch, text, holds):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    path = tmp_path / "fabric" / "NVIDIA_X_200.json"
    path.parent.mkdir()
    if text is not None:
        path.write_text(text)
    fabric.has_whole_lines.cache_clear()
    assert fabric.has_whole_lines("NVIDIA X-200") is holds
    fabric.has_whole_lines.cache_clear()


OF_PLUGINS = [name for name in dir(CollectiveConformance) if name.startswith(("test_static", "test_world"))]


class Host(CollectiveConformance):
    """The kit's tests without ranks, of an algorithm that is no plugin."""

    @pytest.fixture
    def created(self):
        return self.algorithm

    @pytest.fixture
    def info(self):
        on_cpu = DeviceType.CPU, *([] if isinstance(self.algorithm, Nvls) else [DeviceType.HIP, DeviceType.CUDA])
        return SimpleNamespace(devices=getattr(self.algorithm, "devices", on_cpu))

    @pytest.fixture
    def target(self):
        return DeviceTarget(DeviceType.CPU)

    def test_host_protocol(self):
        assert member_problems(self.algorithm, Collective) == []

    test_host_diagnosis = None


for _each in registered().values():
    if _each.op in OPS and "torch" in _each.layouts and _each.name != "copy_engine":  # whose driver is not here
        _own = dict.fromkeys(OF_PLUGINS) | {"algorithm": _each}
        globals()[f"Test_{_each.op}_{_each.name}"] = type(f"Test_{_each.op}_{_each.name}", (Host,), _own)
