"""What a report says of the machine."""

import datetime
import subprocess

import pytest
import torch

from iris_allocators.settings import HostSettings, TorchSettings, VmemSettings
from iris_core.bench import machine
from iris_core.settings import plugin_prefix


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
    for name in machine.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setenv("SECRET", "never shown")
    switches = machine.describe()["switches"]
    assert switches == {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": None, "NCCL_PROTO": "LL"}


def test_settings_of_the_allocators_are_switches():
    torchs = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
    allocators = {"host": HostSettings, "torch": TorchSettings, "vmem": VmemSettings}
    ours = {
        f"{plugin_prefix(name)}{field}".upper()
        for name, settings in allocators.items()
        for field in settings.model_fields
    }
    assert "IRIS_VMEM__GRANULE" in ours
    assert torchs | ours <= set(machine.SWITCHES)


def test_gpus_come_from_the_vendors_tool(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    output = "580.1.2, NVIDIA H200\n580.1.2, NVIDIA H200\n"
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, output))
    assert machine._gpus() == {"gpu": "NVIDIA H200", "gpus": 2, "driver": "580.1.2"}


@pytest.mark.parametrize("failure", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 30)])
def test_gpus_without_the_tool(monkeypatch, failure):
    def missing(*_, **__):
        raise failure

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(machine, "_found", lambda pattern, path: "6.1")
    assert machine._gpus() == {"gpu": "GPU 0", "gpus": 1, "driver": "6.1"}
