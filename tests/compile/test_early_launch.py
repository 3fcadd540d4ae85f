"""Kernels that come up while the one before still runs look at no memory before that one has ended."""

import re

import torch
from tables import table

from iris_triton.device_barrier import device_barrier, signal, signal_wait
from iris_triton.launcher import early_launch
from iris_triton.testing.compile_only import assembly, compile_for

ARGUMENTS = (torch.int64, torch.int64, 8, 1000, 0, 1)
MEMORY = re.compile(r"^\s*(@\S+ )?(ld|st|atom|red)\.\S*(global|relaxed|acquire|release)", re.MULTILINE)
WAIT = re.compile(r"\bld\.acquire\.")


def barrier(target, **options):
    return compile_for(device_barrier, ARGUMENTS, {"sem": "release", "LANES": 8, "num_warps": 1, **options}, target)


def test_nothing_is_read_before_the_wait_and_nothing_waits_for_peers_when_the_next_kernel_starts():
    """It may take all multiprocessors, also the one that a peer's kernel would be waited for with."""
    compiled = barrier("sm_90", EARLY=True, launch_pdl=True)
    assert compiled.metadata.launch_pdl
    text = assembly(compiled)
    memory, begin = MEMORY.search(text), text.index("griddepcontrol.wait")
    assert memory is not None
    assert begin < memory.start()
    last = [wait.start() for wait in WAIT.finditer(text)][-1]
    assert "bar.sync" in text[last : text.index("griddepcontrol.launch_dependents")]


@table("target", ["sm_90", "gfx942", "gfx950"])
def test_without_it_nothing_is_there_and_signals_of_the_host_compile(target):
    """A release of the whole system; "add" is one atomic operation."""
    assert "griddepcontrol" not in assembly(barrier(target, EARLY=False))
    for word in (torch.int32, torch.int64):
        for add in (False, True):
            text = assembly(compile_for(signal, (word, 1), {"ADD": add, "num_warps": 1}, target))
            wanted = r"(atom|red)\.\S*sys\S*add" if add else r"release\.sys|membar\.sys|fence\.\S*sys"
            assert re.search(wanted if target == "sm_90" else "atomic_add|atomic_swap", text)
        awaited = assembly(compile_for(signal_wait, (word, 1, 1000, 0, 1), {"cmp": "ge", "num_warps": 1}, target))
        assert WAIT.search(awaited) if target == "sm_90" else "s_cbranch" in awaited


@table("device, hip, capability, early", [
    ("cpu", None, None, {}), ("cuda:1", None, (9, 0), {"launch_pdl": True}), ("cuda:1", None, (8, 9), {}),
    ("cuda:0", "6.3", (9, 4), {}),
])  # fmt: skip
def test_where_it_is_possible(monkeypatch, device, hip, capability, early):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: capability)
    assert early_launch(device) == early
