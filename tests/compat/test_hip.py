"""iris.hip on devices that are not here: what torch would say of them is pretended."""

import types

import pytest
import torch
from tables import raises, table

import iris_triton as iris
from iris_core.errors import DeviceError, UnsupportedError
from iris_triton import hip


@table(("arch", "units", "name", "dies"), [
    ("gfx942:sramecc+:xnack-", 304, "gfx942", 8), ("gfx942:sramecc+:xnack-", 228, "gfx942", 6),
    ("gfx942", 38, "gfx942", 1), ("gfx950", 256, "gfx950", 8), ("gfx90a", 104, "gfx90a", 1), ("", 132, "sm_90", 1),
])  # fmt: skip
def test_what_a_device_is(monkeypatch, arch, units, name, dies):
    properties = types.SimpleNamespace(gcnArchName=arch, multi_processor_count=units, major=9, minor=0)
    for function, answer in (("is_available", True), ("device_count", 2), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, function, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482-0f2d60242" if arch else None)
    for index in (None, 0, 1):
        assert (hip.get_arch_string(index), hip.get_num_xcc(index), hip.get_cu_count(index)) == (name, dies, units)
        assert hip.get_wall_clock_rate(index) == (100_000 if arch else 1_000_000)
    assert (hip.count_devices(), hip.get_device_id()) == (2, 1)
    assert [iris.get_device_id_for_rank(rank) for rank in (0, 1, 5)] == [0, 1, 1]
    for ask in (hip.get_cu_count, hip.get_arch_string, hip.get_wall_clock_rate, hip.set_device):
        with raises(DeviceError, name="cuda:2"):
            ask(2)
    if arch:
        assert hip.get_rocm_version() == (6, 4)
    else:
        with pytest.raises(UnsupportedError):
            hip.get_rocm_version()


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (hip.count_devices(), hip.get_device_id(), hip.get_arch_string(), hip.get_num_xcc()) == (0, 0, "cpu", 1)
    assert hip.get_cu_count() > 0
    with raises(DeviceError, name="cuda:1"):
        hip.get_cu_count(1)
