"""Files of compiled kernels are kept where IRIS_KERNEL_ARTIFACTS_DIR says."""

import json

import pytest
import torch
import triton
import triton.language as tl

from iris_core.types import ContextSpec, CreateRequest, DeviceTarget, DeviceType
from iris_triton.backend import TritonBackend
from iris_triton.settings import TritonSettings
from iris_triton.testing.artifacts import Artifacts
from iris_triton.testing.compile_only import assembly, compile_for


@triton.jit
def doubled(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) * 2)


@pytest.mark.parametrize(("target", "kind"), [("sm_90", "ptx"), ("gfx942", "amdgcn")])
def test_files(tmp_path, monkeypatch, target, kind):
    heard = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **facts: heard.append(facts["metadata"]["name"]))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    artifacts = Artifacts(tmp_path / "kept", 3)
    artifacts.install()
    doubled.device_caches.clear()
    try:
        small, large = (compile_for(doubled, (torch.float32,), {"BLOCK": n}, target) for n in (64, 128))
    finally:
        artifacts.remove()
    assert heard == ["doubled", "doubled"]  # whoever listened before still does
    folders = sorted((tmp_path / "kept" / "doubled" / "rank_3").iterdir())
    assert len(folders) == 2
    texts = {folder: (folder / f"kernel.{kind}").read_text() for folder in folders}
    assert sorted(texts.values()) == sorted([assembly(small), assembly(large)])
    for folder in folders:
        assert folder.name.startswith("w4_")
        assert {f"kernel.{each}" for each in ("ttir", "ttgir", "llir", kind)} < {each.name for each in folder.iterdir()}
        about = json.loads((folder / "metadata.json").read_text())
        assert about["name"] == "doubled"
        assert about["signature"]["x"] == "*fp32"
        assert about["triton"] == triton.__version__
    doubled.device_caches.clear()
    compile_for(doubled, (torch.float32,), {"BLOCK": 256}, target)
    assert len(list((tmp_path / "kept" / "doubled" / "rank_3").iterdir())) == 2  # removed


def test_a_kernel_runs_even_if_its_files_cannot_be_kept(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    artifacts = Artifacts(tmp_path / "file" / "below", 0)
    monkeypatch.setattr(triton.knobs.compilation, "listener", artifacts)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    doubled.device_caches.clear()
    with caplog.at_level("WARNING", logger="iris"):
        assert compile_for(doubled, (torch.float32,), {"BLOCK": 32})
    assert "the files of kernel doubled were not kept" in caplog.text


def test_the_backend_listens_while_it_is_attached(tmp_path, monkeypatch):
    before = triton.knobs.compilation.listener
    monkeypatch.setenv("IRIS_KERNEL_ARTIFACTS_DIR", str(tmp_path))
    target = DeviceTarget(DeviceType.CUDA, 0)
    backend = TritonBackend(CreateRequest(target, 1, 2, 1 << 20, TritonSettings()))
    monkeypatch.setattr(torch, "tensor", lambda *arguments, **options: None)  # there is no GPU
    backend.make_context(ContextSpec(1, 2, (0, 4096), device="cuda:0"))
    backend.attach(None)
    assert isinstance(triton.knobs.compilation.listener, Artifacts)
    backend.detach()
    assert triton.knobs.compilation.listener is before
