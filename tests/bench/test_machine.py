"""What a report says of the machine."""

import datetime
import os

import torch

from iris_core.bench import machine


def test_the_description_is_whole():
    about = machine.describe()
    assert set(about) == {
        "cpu", "usable_cores", "load_average_1min", "gpu", "gpus", "driver", "kernel", "versions", "switches", "date",
    }  # fmt: skip
    assert about["cpu"]
    assert about["usable_cores"] > 0
    assert about["versions"]["torch"]
    assert about["versions"]["iris-core"]
    assert about["versions"]["cuda"] == torch.version.cuda
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(about["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=1)


def test_switches_are_shown_where_they_are_set_and_two_always(monkeypatch):
    shown = {"NCCL_PROTO": "LL", "IRIS_VMEM__GRANULE": "2MiB", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in os.environ:
        monkeypatch.delenv(name)
    for name, value in (shown | {"NCCL_NVLS_ENABLE": "0", "SECRET": "x", "IRIS_CACHE_DIR": "/home/me"}).items():
        monkeypatch.setenv(name, value)
    switches = machine.describe()["switches"]
    assert switches == {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": None, **shown}


def test_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(machine, "_found", lambda pattern, path: "580.1.2")
    about = machine.describe()
    assert (about["gpu"], about["gpus"], about["driver"]) == ("NVIDIA H200", 2, "580.1.2")
