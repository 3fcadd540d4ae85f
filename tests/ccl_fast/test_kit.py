"""The conformance kit on what every algorithm says of itself; tests/kit makes the kit's calls on ranks."""

from types import SimpleNamespace

import pytest
from ccl_cases import OPS, registered

from iris_core.protocols import Collective
from iris_core.testing import CollectiveConformance
from iris_core.testing.conformance.plugin import member_problems
from iris_core.types import DeviceTarget, DeviceType
from iris_triton.collectives.nvls import Nvls

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
