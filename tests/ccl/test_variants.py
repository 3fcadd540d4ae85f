"""Portable algorithms: what they serve, what they cost, how they copy elements, and the copy engines."""

import importlib
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ccl_cases import Case, kinds, registered, request
from tables import table

from iris_core.ccl import Config
from iris_core.dispatch.choice import Chooser, Tables
from iris_core.dispatch.requests import CollectiveCall, Here
from iris_core.errors import DriverError
from iris_core.types import DeviceTarget, DeviceType
from iris_triton.collectives import collectives, fast_collectives
from iris_triton.collectives.packets import base
from iris_triton.collectives.parts import side as copies
from iris_triton.collectives.pull import pull
from iris_triton.testing.compile_only import assembly, compile_for


@table(("op", "name", "changes", "reason"), [
    ("all_gather", "push", {"config": {"swizzle_size": 2}}, "swizzle_size"),
    ("all_to_all", "push", {"splits": "uneven", "shape": (40, 3)}, "equal"),
    ("all_to_all", "persistent", {"layout": "columns"}, "layout"),
    ("all_reduce", "nvls_two_shot", {"reduction": "max"}, "bfloat16"),
    ("reduce_scatter", "nvls", {"dtype": "float64"}, "bfloat16"),
    ("all_gather", "copy_engine", {"place": "strided"}, "dense"),
    ("all_reduce", "sentinel_two_shot", {"dtype": "int32"}, "any value"),
    ("all_reduce", "sentinel_split", {"dtype": "float64"}, "any value"),
    ("all_reduce", "sentinel_split", {"place": "ordinary"}, "heap"),
    ("all_reduce", "ll_one_shot", {"dtype": "complex64"}, "complex64"),
    ("all_reduce", "ll_one_shot", {"config": {"block_size_m": 8}}, "block_size_m"),
    ("all_reduce", "ll_one_shot", {}, "up to 8 ranks"),
])  # fmt: skip
def test_what_is_refused(op, name, changes, reason):
    algorithm = registered()[op, name]
    assert algorithm.supports(request(Case(op), 4))
    assert reason in algorithm.supports(request(Case(op, **changes), 4 if changes else 9)).reason


@table("device", [DeviceType.CPU, DeviceType.HIP])
def test_packets_are_for_nvidia(device):
    asked = [each.supports(request(Case(each.op), 4, target=DeviceTarget(device))) for each in fast_collectives()]
    assert all("NVIDIA" in answer.reason for answer in asked)


@table("target", [DeviceType.CUDA, DeviceType.HIP])
@table(("op", "name"), kinds("nvls"))
def test_they_are_listed_with_the_reason_without_addresses_of_all_heaps_else_chosen_by_name(tmp_path, op, name, target):
    on_cpu = request(Case(op), 4)
    without = replace(on_cpu, target=DeviceTarget(target))
    chooser = Chooser(collectives(), Tables(tmp_path, [], "any"), [])
    for asked, ok, reason in (
        (without, False, "IRIS_VMEM__MULTICAST"),
        (replace(without, multicast=True), True, "by name"),
        (on_cpu, True, "by name"),
    ):
        explained = chooser.explain(asked, None)
        (found,) = (each for each in explained.candidates if each.name == name)
        assert (found.ok, reason in found.reason, explained.algorithm == name) == (ok, True, False)
        assert ok == (chooser.explain(asked, Config(algorithm=name)).algorithm == name)


def test_the_addresses_of_all_heaps_are_those_of_a_group_of_all_ranks():
    call = CollectiveCall("all_reduce", (torch.zeros(3), torch.ones(3)), None, None)
    for has_them, members in ((True, (0, 1, 2)), (True, (2, 0)), (False, (0, 1, 2))):
        here = Here(0, 3, DeviceTarget(DeviceType.CPU), (0, 0), multicast=has_them)
        assert call.describe(here, members).multicast == (has_them and len(members) == 3)


@table("size", [2, 3, 8])
@table("nbytes", [1 << 10, 1 << 16, 1 << 20, 1 << 24])
@table(("op", "name"), [key for key in registered() if key[1] != "copy_engine"])  # its driver is not here
def test_what_is_worth_measuring_is_served_and_differs(monkeypatch, op, name, size, nbytes):
    monkeypatch.setattr(base, "lines_problem", lambda index: "")
    algorithm = {(each.op, each.name): each for each in (*fast_collectives(), *collectives(packets=False))}[op, name]
    case = Case(op, layout="torch" if "torch" in algorithm.layouts else "tiles")
    asked = request(case, size, nbytes=nbytes, target=DeviceTarget(DeviceType.CUDA), multicast=True)
    offered = algorithm.tunings(asked)
    assert offered[0] == {}
    assert len(offered) > (nbytes >= 1 << 20)
    assert all(offered.count(config) == 1 and Config(**config).given(op) == config for config in offered)
    requests = [replace(asked, options={**asked.options, "config": config}) for config in offered]
    assert all(map(algorithm.supports, requests))
    if isinstance(algorithm, base.PacketCollective):
        assert len({algorithm._launch_of(each) for each in requests}) == len(offered) <= 6


class Code(int):
    name = "INVALID_VALUE"


CUDA, HIP = ("cuda.bindings", "driver", "CUresult", "CUDA_SUCCESS"), ("hip", "hip", "hipError_t", "hipSuccess")


@table(("device", "copy", "write", "driver"), [
    (DeviceType.CUDA, "cuMemcpyDtoDAsync", "cuStreamWriteValue32", CUDA),
    (DeviceType.HIP, "hipMemcpyDtoDAsync", "hipStreamWriteValue32", HIP),
])  # fmt: skip
def test_copies_of_a_gpu_and_words_behind_them(monkeypatch, device, copy, write, driver):
    module, name, holder, success = driver
    asked = {each: mock.Mock(__name__=each, side_effect=[(Code(0),), (Code(1),)]) for each in (copy, write)}
    there = SimpleNamespace(**asked, **{holder: SimpleNamespace(**{success: Code(0)})}, CUdeviceptr=int, CUstream=int)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: there}))
    (moves, writes, *_), given = copies.engines(device), (1 << 40, 1 << 41, 4096, 7)
    for call, function, wanted in ((moves, copy, given), (writes, write, (7, *given[:-1]))):  # where the stream is
        call(*given)
        asked[function].assert_called_once_with(*wanted)
        with pytest.raises(DriverError) as caught:
            call(*given)
        assert (caught.value.call, caught.value.code) == (function, 1)


@table("found", [lambda name: None, lambda name: importlib.import_module("no_such_package")])
def test_copies_without_a_driver(monkeypatch, found):
    """Neither the module nor, it may be, the package that it is in."""
    monkeypatch.setattr(copies.importlib.util, "find_spec", found)
    assert copies.copies_obstacle(DeviceType.CPU) == ""
    assert "cuda-bindings" in copies.copies_obstacle(DeviceType.CUDA)
    assert "hip-python" in copies.copies_obstacle(DeviceType.HIP)


def test_strided_outputs_are_written_by_16_bytes():
    words, anything = torch.int64, 1 << 40
    ranks, parts, bound = (1, 1, 1), (anything,) * 6, (anything, anything)  # of equal parts there is no table
    sides = ((), (), (4, 8192, 7168), (7168, 28672, 1))
    arguments = (torch.bfloat16, torch.bfloat16, words, torch.uint8, None, words, *ranks, *parts, *bound, *sides)
    constants = {"SIZE": 4, "SOURCE": "direct", "SHARED": True, "IN_DIMS": 0, "OUT_DIMS": 3, "BLOCK": 2048}
    text = assembly(compile_for(pull, arguments, constants, "sm_90"))
    assert re.search(r"st\.global\.v4\.b32", text)
    assert re.search(r"ld\.global\.v4\.b32", text)
