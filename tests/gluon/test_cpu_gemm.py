"""The GEMM core for Hopper on the CPU with one mistake at a time, each of which must be found."""

import importlib.util
import pathlib
import re

import pytest
import torch
from gluon_kernels import describe
from tables import table

from iris_gluon.gemm import hopper
from iris_gluon.interpreter.errors import MBarrierError, RaceError, UninitializedMemoryError
from iris_triton import interpreter

PRODUCT = """

@gluon.jit
def product(a, b, c, tiles_m, tiles_n, k_tiles, STAGES: gl.constexpr):
    order = gemm.RowGroups(tiles_m, tiles_n, 1)
    multiply_tiles(a, b, order, gemm.StoreTile(c), tiles_m * tiles_n, k_tiles, STAGES, 2, 4)
"""
FULL = "mbarrier.wait(full.index(stage), (step // a_stages.type.shape[0]) & 1)"
EMPTY = "mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)"
EXPECT = "mbarrier.expect(full.index(stage), NBYTES)"
ARRIVE = "mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)"
LAST_ARRIVE = "mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)\n"
LOAD_B = "tma_load(b_desc, [k * BLOCK_K, column * BLOCK_N], full.index(stage), b_stages.index(stage))"
INIT = "mbarrier.init(full.index(stage), count=1)"
PARTITIONS = re.compile(r"(\(_multiply, .*?\)\),)(\s+)(\(_load, .*?\)\),)", re.DOTALL)


def multiply(tmp_path, mistake, first):
    """Whether A @ B is right by the product's source with replacements and the named partition as the first one."""
    text = pathlib.Path(hopper.__file__).read_text() + PRODUCT
    text = text.replace("from iris_gluon.bulk import", "from iris_gluon import gemm\nfrom iris_gluon.bulk import", 1)
    for old, new in mistake.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    if first == "loader":
        text, count = PARTITIONS.subn(r"\3\2\1", text.replace("[_LOADER_WARPS],", "[4],"))
        assert count == 1
    path = tmp_path / f"core_{first}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    a, b = (torch.randint(-2, 3, size).to(torch.bfloat16) for size in ((128, 512), (512, 128)))
    c = torch.full((128, 128), float("nan"), dtype=torch.bfloat16)
    descriptions = describe(a, [64, 64]), describe(b, [64, 64]), describe(c, [64, 32])
    core.product[(1,)](*descriptions, 2, 2, 8, 3, num_warps=4)
    return torch.equal(c, (a.float() @ b.float()).to(torch.bfloat16))


DEADLOCK = (interpreter.DeadlockError,)
UNWRITTEN, TOO_FAST = (UninitializedMemoryError, RaceError), (MBarrierError, RaceError)


@table("mistake, errors, text", [
    ({FULL: ""}, UNWRITTEN, "never been written|may still be writing"),
    ({FULL: FULL[:-1] + " ^ 1)"}, UNWRITTEN, "never been written|may still be writing"),
    ({EMPTY: ""}, TOO_FAST, "wait for the phase before arriving again|overwrites"),
    ({EMPTY: EMPTY[:-5] + ")"}, DEADLOCK, r"'empty\[0\]' with phase=0.*lacks 1 of 1 arrivals"),
    ({EMPTY: "mbarrier.wait(empty.index(stage), 1)"}, TOO_FAST, "wait for the phase|overwrites"),
    ({EXPECT: EXPECT[:-1] + " + 16)"}, DEADLOCK, r"'full\[0\]'.*16 bytes that mbarrier.expect announced and no copy"),
    ({EXPECT: EXPECT[:-1] + " - 16)"}, (MBarrierError,), r"'full\[0\]' brought 16 bytes more"),
    ({EXPECT: ""}, DEADLOCK, r"'full\[0\]'.*lacks 1 of 1 arrivals and an mbarrier.expect for 16384 bytes"),
    ({LOAD_B: "pass"}, DEADLOCK, r"8192 bytes that mbarrier.expect announced"),
    ({ARRIVE: "mbarrier.arrive(empty.index(step % STAGES), count=1)", LAST_ARRIVE: "\n"}, (RaceError,),
     "TMA load overwrites '[ab]_stages.*warpgroup_mma_wait first"),
    ({ARRIVE: "", LAST_ARRIVE: "\n"}, DEADLOCK,
     r"(partition 1 \(_load\)|the default partition) waits for mbarrier 'empty\[0\]' with phase=0"),
    ({"acc = hopper.warpgroup_mma_wait(0, deps=(acc,))": ""}, (RaceError,),
     "result of warpgroup_mma .* call warpgroup_mma_wait"),
    ({"    tma.store_wait(0)": ""}, (RaceError,), "store overwrites 'part'.*call tma.store_wait first"),
    ({"hopper.fence_async_shared()": ""}, (RaceError,), "TMA store of 'part' .*async proxy.*fence_async_shared"),
    ({"await_bulk_stores()": ""}, (RaceError,), r"ends while 1 TMA stores .* tma.store_wait\(0\)"),
    ({INIT: f"if stage > 0:\n            {INIT}"}, (MBarrierError,), r"'full\[0\]', which mbarrier.init has not"),
])  # fmt: skip
def test_a_mistake_is_found_whoever_runs_first(tmp_path, mistake, errors, text):
    for first in ["multiplier", "loader"]:
        with interpreter.configured(timeout_s=1e6), pytest.raises(errors, match=f"(?s){text}"):  # not after the bound
            multiply(tmp_path, mistake, first)


@pytest.mark.parametrize("first", ["multiplier", "loader"])
def test_without_one_it_is_right(tmp_path, first):
    assert multiply(tmp_path, {}, first)
