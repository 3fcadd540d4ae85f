"""What the doctor says of GPUs, on pretended ones: torch, NVML, nvidia-smi and amdsmi are stand-ins."""

from __future__ import annotations

import enum
import importlib
import json
import subprocess
import sys
import types

import pytest

from iris_core import cli
from iris_core.cli.doctor import gpus, nvidia, selftest, tables, topology
from iris_core.cli.doctor import survey as surveys
from iris_core.cli.doctor.links import Unavailable, label
from iris_core.diagnosis import PairCheck, Verdict
from iris_core.registry import reset_default_registry

GIB = 1 << 30


def bus(index):
    """PCI bus id of a pretended GPU as torch has it."""
    return f"00000000:{0x18 + index:02x}:00.0"


def fake_torch(count=8, *, hip=None, cuda="13.0", access=lambda one, other: True, init=None, **changes):
    """The parts of torch that the doctor looks at."""

    def properties(index):
        place = {"pci_domain_id": 0, "pci_bus_id": 0x18 + index, "pci_device_id": 0}
        arch = {"gcnArchName": "gfx942:sramecc+"} if hip else {"major": 9, "minor": 0}
        given = {
            "name": "NVIDIA H200",
            "total_memory": 140 * GIB,
            "multi_processor_count": 132,
            "uuid": f"uuid-{index}",
            **place,
            **arch,
            **changes,
        }
        return types.SimpleNamespace(**{name: value for name, value in given.items() if value is not None})

    def start():
        if init is not None:
            raise init

    return types.SimpleNamespace(
        __version__="2.11.0+cu130",
        version=types.SimpleNamespace(cuda=None if hip else cuda, hip=hip),
        cuda=types.SimpleNamespace(
            is_available=lambda: count > 0,
            device_count=lambda: count,
            get_device_properties=properties,
            can_device_access_peer=access,
            init=start,
            nccl=types.SimpleNamespace(version=lambda: (2, 28, 9)),
        ),
    )


class FakeNvml(types.ModuleType):
    """NVML with the names and habits of nvidia-ml-py."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_CAPS_INDEX_ATOMICS = 2, 3
    NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE, NVML_TOPOLOGY_HOSTBRIDGE = 10, 20, 30
    NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM = 40, 50
    NVML_COMPUTEMODE_DEFAULT, NVML_COMPUTEMODE_PROHIBITED, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 0, 2, 3

    class NVMLError(Exception):
        """As the package's."""

    def __init__(self, count=8, **changes):
        super().__init__("pynvml")
        self.count = count
        self.nvlink = lambda one, other: True
        self.down = set()  # (GPU, link)
        self.remote = lambda index, link: None  # a switch that cannot be seen
        self.ancestor = lambda one, other: self.NVML_TOPOLOGY_SYSTEM
        self.mode = self.NVML_COMPUTEMODE_DEFAULT
        self.starts = True
        self.open = 0
        self.__dict__.update(changes)

    def nvmlInit(self):
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.82.07"

    def nvmlSystemGetCudaDriverVersion(self):
        return 13000

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        index = int(bus_id.split(":")[1], 16) - 0x18
        if not 0 <= index < self.count:
            raise self.NVMLError("Not Found")
        return index

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(free=100 * GIB)

    def nvmlDeviceGetComputeMode(self, handle):
        return self.mode

    def nvmlDeviceGetNvLinkState(self, handle, link):
        return int((handle, link) not in self.down)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        far = self.remote(handle, link)
        if far is None:
            raise self.NVMLError("Not Supported")
        return types.SimpleNamespace(busId=far)

    def nvmlDeviceGetP2PStatus(self, one, other, index):
        return 0 if index == self.NVML_P2P_CAPS_INDEX_ATOMICS or self.nvlink(one, other) else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return self.ancestor(one, other)


@pytest.fixture
def nvml(monkeypatch):
    """Installs a pretended NVML; every one of them has to be closed."""
    made = []

    def install(**changes):
        made.append(FakeNvml(**changes))
        monkeypatch.setitem(sys.modules, "pynvml", made[-1])
        return made[-1]

    yield install
    assert [each.open for each in made] == [0] * len(made)


@pytest.fixture
def no_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture
def smi(monkeypatch):
    """Lets nvidia-smi print something; what it is asked for decides."""

    def install(topology, listed):
        def run(command, **kwargs):
            text = topology if "topo" in command else listed
            if isinstance(text, Exception):
                raise text
            return subprocess.CompletedProcess(command, 0, text, "")

        monkeypatch.setattr(nvidia.subprocess, "run", run)

    return install


def survey(torch, hip=False):
    """GPUs, pairs with their links, and findings, as the survey puts them together."""
    found = gpus.list_gpus(torch)
    pairs = gpus.peer_access(torch, found)
    links, findings, versions = topology.find_links(found, hip)
    for pair in pairs:
        pair.update(links.get((pair["from"], pair["to"]), {"link": "unknown", "link_count": None, "atomics": None}))
    return found, pairs, [*gpus.describe(found), *gpus.judge_access(pairs, hip), *findings], versions


def finding(findings, subject):
    (found,) = (each for each in findings if each.subject == subject)
    return found


# -- NVIDIA -----------------------------------------------------------------------------------------------------------
def test_eight_gpus_behind_switches(nvml):
    nvml()
    found, pairs, findings, versions = survey(fake_torch())
    assert found[3] == {
        "index": 3,
        "name": "NVIDIA H200",
        "memory_bytes": 140 * GIB,
        "arch": "sm_90",
        "compute_units": 132,
        "pci_bus_id": bus(3),
        "uuid": "uuid-3",
        "free_bytes": 100 * GIB,
        "compute_mode": "default",
        "fabric_state": None,
    }
    assert len(pairs) == 56
    assert pairs[0] == {"from": 0, "to": 1, "access": True, "link": "nvlink", "link_count": 18, "atomics": True}
    assert versions == {"nvidia_driver": "580.82.07", "cuda_of_driver": "13.0"}
    assert {each.verdict for each in findings} == {Verdict.OK}
    assert finding(findings, "GPU 0").text == f"NVIDIA H200, 140.0 GiB (100.0 GiB free), sm_90, {bus(0)}"
    assert finding(findings, "GPU links").text == "NV18 between 56 of 56 ordered pairs"
    matrix = tables.link_matrix(pairs)
    assert max(map(len, matrix.splitlines())) <= tables.WIDTH
    assert matrix.splitlines()[1].split() == ["GPU", *map(str, range(8))]
    assert matrix.splitlines()[4].split() == ["2", "NV18", "NV18", "-", *["NV18"] * 5]


def test_links_that_are_down_count(nvml):
    nvml(down={(2, 0), (2, 7)})
    _, pairs, _, _ = survey(fake_torch(4))
    counts = {(pair["from"], pair["to"]): pair["link_count"] for pair in pairs}
    assert counts[0, 1] == 18
    assert counts[0, 2] == counts[2, 0] == 16


def test_direct_links_are_counted_by_their_far_end(nvml):
    """Two GPUs with 4 links to each of the others, whose bus ids have domains of four digits."""
    nvml(count=4, remote=lambda index, link: f"0000:{0x18 + [j for j in range(4) if j != index][link % 3]:02X}:00.0")
    _, pairs, _, _ = survey(fake_torch(4))
    assert {pair["link_count"] for pair in pairs} == {6}


@pytest.mark.parametrize("far", ["", b"", "FFFFFFFF:FF:FF.F", b"00000000:07:00.0", "nothing"])
def test_a_far_end_that_is_no_gpu_is_a_switch(nvml, far):
    nvml(remote=lambda index, link: far)
    _, pairs, _, _ = survey(fake_torch(2))
    assert [label(pair) for pair in pairs] == ["NV18", "NV18"]


@pytest.mark.parametrize(("level", "path"), [(10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS")])
def test_paths_over_pcie(nvml, level, path):
    nvml(count=2, nvlink=lambda one, other: False, ancestor=lambda one, other: level)
    _, pairs, findings, _ = survey(fake_torch(2))
    assert [label(pair) for pair in pairs] == [path, path]
    assert finding(findings, "GPU links").verdict is Verdict.OK


def test_a_pair_that_fell_back_to_pcie_is_noted(nvml):
    nvml(nvlink=lambda one, other: 5 not in (one, other))
    _, pairs, findings, _ = survey(fake_torch())
    said = finding(findings, "GPU links")
    assert said.verdict is Verdict.NOTE
    assert "NV18 between 42 of 56 ordered pairs, SYS between 14 of 56" in said.text
    assert tables.link_matrix(pairs).splitlines()[7].split() == ["5", *["SYS"] * 5, "-", *["SYS"] * 2]


def test_no_peer_access_is_broken_and_marked(nvml):
    nvml()
    _, pairs, findings, _ = survey(fake_torch(access=lambda one, other: {one, other} != {0, 1}))
    said = finding(findings, "peer access")
    assert said.verdict is Verdict.BROKEN
    assert "0->1, 1->0. No heap can span them" in said.text
    assert "CUDA_VISIBLE_DEVICES" in said.text
    assert tables.link_matrix(pairs).splitlines()[2].split()[:3] == ["0", "-", "NV18!"]


def test_many_missing_pairs_are_not_all_listed(nvml):
    nvml()
    _, _, findings, _ = survey(fake_torch(access=lambda one, other: False))
    assert "and 48 more" in finding(findings, "peer access").text


def test_a_driver_that_does_not_answer_for_a_pair(nvml):
    nvml()

    def refuse(one, other):
        raise RuntimeError("CUDA error: invalid device ordinal")

    _, pairs, findings, _ = survey(fake_torch(2, access=refuse))
    assert [pair["access"] for pair in pairs] == [None, None]
    assert finding(findings, "peer access").verdict is Verdict.NOTE


def test_a_compute_mode_that_keeps_ranks_apart(nvml):
    nvml(mode=3)
    _, _, findings, _ = survey(fake_torch(2))
    assert finding(findings, "GPU 1").verdict is Verdict.NOTE
    assert "nvidia-smi -i 1 -c DEFAULT" in finding(findings, "GPU 1").text


@pytest.mark.parametrize(("state", "said"), [(1, "not started"), (2, "in progress"), (3, "")])
def test_a_fabric_that_is_not_ready(nvml, state, said):
    import ctypes

    class Info(ctypes.Structure):
        _fields_ = (("state", ctypes.c_uint),)

    def ask(handle, pointer):
        pointer._obj.state = state
        return 0

    nvml(c_nvmlGpuFabricInfoV_t=Info, nvmlDeviceGetGpuFabricInfoV=ask)
    found, _, findings, _ = survey(fake_torch(2))
    assert found[0]["fabric_state"] == (said or "completed")
    assert ("nvidia-fabricmanager" in finding(findings, "GPU 0").text) == bool(said)


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-95\t0
GPU1\tNV18\t X \tPXB\tSYS\t0-95\t0
GPU2\tSYS\tPXB\t X \tSYS\t96-191\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
LISTED = "".join(f"{n}, 00000000:{0x1A - n:02X}:00.0, 580.82.07\n" for n in range(3))
"""The tool's GPU 0 is torch's GPU 2, and the other way round."""


def test_without_nvml_the_tool_is_read(no_nvml, smi):
    smi(TOPOLOGY, LISTED)
    _, pairs, findings, versions = survey(fake_torch(3))
    links = {(pair["from"], pair["to"]): label(pair) for pair in pairs}
    assert links == {(2, 1): "NV18", (1, 2): "NV18", (2, 0): "SYS", (0, 2): "SYS", (1, 0): "PXB", (0, 1): "PXB"}
    assert pairs[0]["atomics"] is None
    assert versions == {"nvidia_driver": "580.82.07"}
    assert "pip install nvidia-ml-py" in finding(findings, "GPU links").text


@pytest.mark.parametrize(
    ("listed", "drawn", "why"),
    [
        (FileNotFoundError(), "", "nvidia-smi is not there"),
        (subprocess.TimeoutExpired("nvidia-smi", 20), "", "did not end within 20 s"),
        (LISTED, "something new", "does not show all GPUs"),
        ("", TOPOLOGY, "does not show all GPUs"),
    ],
)
def test_where_nobody_can_be_asked_links_are_unknown(no_nvml, smi, listed, drawn, why):
    smi(drawn, listed)
    _, pairs, findings, _ = survey(fake_torch(3))
    said = finding(findings, "GPU links")
    assert said.verdict is Verdict.NOTE
    assert said.text.startswith("unknown: nvidia-ml-py is not installed")
    assert why in said.text
    assert {label(pair) for pair in pairs} == {"?"}
    assert "?" in tables.link_matrix(pairs)


@pytest.mark.parametrize(
    ("changes", "torch_changes", "why"),
    [
        ({"starts": False}, {}, "NVML does not start: Driver Not Loaded"),
        ({"count": 1}, {}, "NVML: Not Found"),
        ({}, {"pci_bus_id": None}, "this torch does not tell"),
    ],
)
def test_an_nvml_that_does_not_answer(nvml, smi, changes, torch_changes, why):
    nvml(**changes)
    smi(FileNotFoundError(), FileNotFoundError())
    _, _, findings, _ = survey(fake_torch(2, **torch_changes))
    assert why in finding(findings, "GPU links").text


def test_one_gpu_needs_no_links(no_nvml, smi):
    smi(FileNotFoundError(), FileNotFoundError())
    _, pairs, findings, _ = survey(fake_torch(1))
    assert pairs == []
    assert [each.subject for each in findings] == ["GPU 0"]
    assert tables.link_matrix(pairs) == ""


# -- AMD --------------------------------------------------------------------------------------------------------------
def fake_amdsmi(name, members):
    module = types.ModuleType("amdsmi")
    setattr(module, name, enum.IntEnum(name, members))
    module.amdsmi_init = module.amdsmi_shut_down = lambda: None
    module.amdsmi_get_processor_handles = lambda: [0, 1]
    module.amdsmi_get_gpu_device_bdf = lambda handle: f"0000:{0x18 + handle:02x}:00.0"
    module.amdsmi_topo_get_link_type = lambda one, other: {"hops": 1, "type": 1 if one < other else 2}
    return module


@pytest.mark.parametrize(
    ("name", "members", "labels"),
    [
        ("AmdSmiIoLinkType", {"UNDEFINED": 0, "PCIEXPRESS": 1, "XGMI": 2}, ["PCIE", "XGMI"]),
        ("AmdSmiLinkType", {"AMDSMI_LINK_TYPE_XGMI": 1, "AMDSMI_LINK_TYPE_PCIE": 2}, ["XGMI", "PCIE"]),
        ("AmdSmiLinkType", {"AMDSMI_LINK_TYPE_UNKNOWN": 1, "AMDSMI_LINK_TYPE_OTHER": 2}, ["?", "?"]),
    ],
)
def test_amd(monkeypatch, name, members, labels):
    monkeypatch.setitem(sys.modules, "amdsmi", fake_amdsmi(name, members))
    found, pairs, _, _ = survey(fake_torch(2, hip="7.0"), hip=True)
    assert found[0]["arch"] == "gfx942"
    assert [label(pair) for pair in pairs] == labels


def test_amd_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    _, _, findings, _ = survey(fake_torch(2, hip="7.0", access=lambda one, other: False), hip=True)
    assert "amdsmi is not installed" in finding(findings, "GPU links").text
    assert "rocm-smi --showtopoaccess" in finding(findings, "peer access").text


def test_amdsmi_that_fails(monkeypatch):
    module = fake_amdsmi("AmdSmiLinkType", {"A": 1})
    module.amdsmi_get_gpu_device_bdf = lambda handle: "0000:ff:00.0"
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    with pytest.raises(Unavailable, match="does not know the GPU at 00000000:18"):
        topology.ask_amdsmi(gpus.list_gpus(fake_torch(2, hip="7.0")))
    module.amdsmi_init = lambda: 1 / 0
    with pytest.raises(Unavailable, match="ZeroDivisionError"):
        topology.ask_amdsmi(gpus.list_gpus(fake_torch(2, hip="7.0")))


# -- torch sees no GPU ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("torch", "present", "hidden", "verdict", "text"),
    [
        (fake_torch(0, cuda=None), [], None, Verdict.OK, "built for CPUs only"),
        (fake_torch(0, cuda=None), ["/dev/nvidia0"], None, Verdict.NOTE, "install a torch for these GPUs"),
        (fake_torch(0), [], None, Verdict.NOTE, "sees no GPU"),
        (fake_torch(0), ["/dev/nvidia0"], "", Verdict.NOTE, "CUDA_VISIBLE_DEVICES='' hides them"),
        (fake_torch(0, init=RuntimeError("no driver")), ["/dev/nvidia0"], None, Verdict.BROKEN, "no driver"),
        (
            fake_torch(0, init=RuntimeError("Error 802: system")),
            ["/dev/nvidia0"],
            None,
            Verdict.BROKEN,
            "fabricmanager",
        ),
        (fake_torch(0, hip="7.0", init=RuntimeError("no")), ["/dev/kfd"], None, Verdict.BROKEN, "ROCm 7.0"),
    ],
)
def test_no_gpu(monkeypatch, torch, present, hidden, verdict, text):
    for name in gpus._HIDING:
        monkeypatch.delenv(name, raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(gpus, "_device_files", lambda: present)
    findings, versions = gpus.torch_and_driver(torch)
    said = finding(findings, "GPUs")
    assert said.verdict is verdict
    assert text in said.text
    assert versions["torch"] == "2.11.0+cu130"


def test_the_driver_on_one_line():
    _, versions = gpus.torch_and_driver(fake_torch())
    assert gpus.describe_driver(versions).verdict is Verdict.NOTE
    versions.update(nvidia_driver="580.82.07", cuda_of_driver="13.0")
    said = gpus.describe_driver(versions)
    assert said.verdict is Verdict.OK
    assert said.text == "NVIDIA 580.82.07, CUDA 13.0 at most, torch is built for CUDA 13.0, NCCL 2.28.9"
    assert gpus.describe_driver(gpus.torch_and_driver(fake_torch(hip="7.0"))[1]).verdict is Verdict.OK


# -- the whole report on eight pretended GPUs --------------------------------------------------------------------------
@pytest.fixture
def eight(monkeypatch, nvml, clean_environment):
    """Eight GPUs; the self-tests on them find rank 2 at fault."""
    importlib.import_module("iris_core.api")  # while torch is still the real one
    importlib.import_module("iris_triton._compat")
    nvml()
    monkeypatch.setitem(sys.modules, "torch", fake_torch())

    def take(timeout_s):
        found = []
        surveys.collect(lambda **fields: found.append(json.loads(json.dumps(fields))))
        return surveys.read_survey(found)[0]

    def plan(registry, count, hip):
        assert (count, hip) == (8, False)
        return [selftest.Job("triton", name, "cuda", count) for name in ("torch", "vmem")]

    def run(job, timeout_s):
        pairs = selftest.expected_pairs(job.ranks)
        wrong = {(2, 5): "lost 3 of 1000 additions"} if job.allocator == "vmem" else {}
        checks = [PairCheck("atomic_add", *pair, wrong.get(pair, "")) for pair in pairs]
        return selftest.Outcome(job, [PairCheck("write", *pair) for pair in pairs] + checks, seconds=1.2)

    monkeypatch.setattr(surveys, "take_survey", take)
    monkeypatch.setattr(selftest, "plan_jobs", plan)
    monkeypatch.setattr(selftest, "run_job", run)
    reset_default_registry()
    yield
    reset_default_registry()


def test_eight_gpus_as_text(eight, capsys):
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= tables.WIDTH
    shown = [line.split() for line in out.splitlines()]
    assert ["2", "NV18", "NV18", "-", *["NV18"] * 5] in shown
    assert ["2", "ok", "ok", "-", "ok", "ok", "FAILED", "ok", "ok"] in shown
    assert ["2", "ok", "ok", "-", "ok", "ok", "ok", "ok", "ok"] in shown
    assert "rank 2 -> rank 5: atomic_add lost 3 of 1000 additions" in out
    assert "driver " in out
    assert "NVIDIA 580.82.07, CUDA 13.0 at most, torch is built for CUDA 13.0, NCCL 2.28.9" in out
    assert out.endswith("1 broken: self-test triton on vmem\n")


def test_eight_gpus_as_json(eight, capsys):
    assert cli.main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [gpu["index"] for gpu in document["gpus"]] == list(range(8))
    assert set(document["gpus"][0]) == {
        "index", "name", "memory_bytes", "arch", "compute_units", "pci_bus_id", "uuid",
        "free_bytes", "compute_mode", "fabric_state",
    }  # fmt: skip
    assert len(document["pairs"]) == 56
    assert set(document["pairs"][0]) == {"from", "to", "access", "link", "link_count", "atomics"}
    assert document["versions"]["nvidia_driver"] == "580.82.07"
    assert [test["state"] for test in document["self_tests"]] == ["passed", "failed"]
    assert sum(not check["ok"] for test in document["self_tests"] for check in test["checks"]) == 1
