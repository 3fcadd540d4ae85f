"""The bytes of places and of views, numbers in cells, tables that are full, and what a pointer carries."""

import contextlib
import itertools

import jobs_corpus
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_text import kernel_of
from tables import raises

from iris_core import Iris
from iris_core.errors import IrisError
from iris_core.world import World
from iris_triton.checker import shared
from iris_triton.checker.given_views import view_of
from iris_triton.checker.histories import different, replaced
from iris_triton.checker.places import place_of
from iris_triton.checker.reports import BOUNDS
from iris_triton.checker.shared import Tables
from iris_triton.interpreter import OutOfBoundsError


def bytes_of(place):
    """The bytes of a place, by offset."""
    granules = np.r_[place.granules]  # also of a slice
    masks = np.broadcast_to(place.masks, granules.shape)
    return {4 * int(g) + k for g, mask in zip(granules, masks, strict=True) for k in range(4) if mask >> k & 1}


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("spread", [64, 1 << 16, 1 << 30])
def test_a_place_has_the_bytes_of_its_elements(itemsize, spread):
    rng = np.random.default_rng(itemsize * spread)
    for count in (1, 2, 17, 64):
        for offsets in (
            rng.integers(0, spread, count) * itemsize,
            rng.integers(0, spread, count) * itemsize + itemsize // 2 % 4,  # crooked
            7 * itemsize + np.arange(count) * itemsize,
        ):
            wanted = {int(offset) + k for offset in offsets for k in range(itemsize)}
            assert bytes_of(place_of(0, offsets.astype(np.int64), itemsize)) == wanted


@pytest.mark.parametrize("high", [9, 1 << 20])
def test_numbers_in_cells_are_found_and_replaced_and_a_full_table_is_an_error(high):
    cells = np.random.default_rng(1).choice([3, 5, high], 100).astype(np.uint32)
    assert different(cells) == sorted({3, 5, high})
    assert (replaced(cells, {3: 1, 5: 2, high: 7}) == np.where(cells == 3, 1, np.where(cells == 5, 2, 7))).all()
    with contextlib.closing(Tables(World(), 1 << 16)) as tables:
        tables.counters[shared.CLOCKS] = 1 << 20
        with tables, raises(IrisError, name="clocks"):
            tables.take(shared.CLOCKS)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float64])
def test_a_view_has_the_bytes_of_its_elements(dtype):
    random = np.random.default_rng(1)
    base = torch.zeros(512, dtype=dtype)
    size = base.element_size()
    offsets = np.arange(-9, 512 * size)
    exact = 0
    for _ in range(300):
        shape = random.integers(1, 5, random.integers(1, 4)).tolist()
        strides = [int(random.choice([0, 1, 2, 3, 4, 5, 8, 12, 16, 32])) for _ in shape]
        view = view_of(base.as_strided(shape, strides), "x", None)
        whole = {
            sum(n * stride for n, stride in zip(at, strides, strict=True)) * size + byte
            for at in itertools.product(*map(range, shape))
            for byte in range(size)
        }
        found = set(offsets[view.has(offsets, 1)].tolist())
        assert whole <= found
        span, are_apart = 1, True
        for stride, count in sorted((s, c) for s, c in zip(strides, shape, strict=True) if s and c > 1):
            are_apart = are_apart and stride >= span
            span += stride * (count - 1)
        if are_apart:
            assert found == whole
            exact += 1
        wide = set(offsets[view.has(offsets, 2 * size)].tolist())
        assert all(set(range(at, at + 2 * size)) <= found for at in wide)
    assert exact > 100


@triton.jit
def through(data, out, OFFSET: tl.constexpr, HOW: tl.constexpr):
    if HOW == "bits":
        ptr = data.to(tl.pointer_type(tl.int32), bitcast=True).to(data.dtype, bitcast=True)
    elif HOW == "integer":
        ptr = (data.to(tl.int64) + 0).to(data.dtype)
    elif HOW == "where":
        ptr = tl.where(tl.arange(0, 4) >= 0, data, out)
    elif HOW == "loop":
        ptr = data
        for _ in range(3):
            ptr += 1
        ptr -= 3
    else:
        ptr = tl.reshape(data + tl.arange(0, 4)[:, None] * 0, [2, 2])
    tl.store(ptr + OFFSET, tl.load(ptr))


def ends(how, offset, checks="bounds"):
    with jobs_corpus.checking("", checks), Iris("1MiB", device="cpu") as ctx:
        whole, out = ctx.zeros(16), ctx.zeros(16)
        try:
            through[(1,)](whole[4:8], out, offset, how)
        except OutOfBoundsError as error:
            return error.report
    return None


@pytest.mark.parametrize("checks", ["bounds", "races,bounds"])
@pytest.mark.parametrize("how", ["bits", "where", "loop", "reshape"])
def test_a_pointer_keeps_its_tensor(how, checks):
    found = ends(how, 4, checks)
    assert (found.kind, found.first, found.last) == (BOUNDS, 16, 19)
    assert "'data' ((4,), float32, strides (1,))" in str(found)
    assert "byte 32 of zeros((16,), float32)" in str(found)
    assert ends(how, 3, checks) is ends("integer", 4) is None
    assert ends(how, -1, checks).first == -4


@pytest.mark.parametrize("text", [
    "tl.store(place.to(tl.pointer_type(data.dtype), bitcast=True), data)", "tl.store(place, data.to(tl.int64))"
])  # fmt: skip
def test_addresses_in_memory_are_addresses(text):
    with jobs_corpus.checking("", "bounds"), Iris("1MiB", device="cpu") as ctx:
        data, place = ctx.zeros(4), ctx.zeros(1, dtype=torch.int64)
        kernel_of(triton.jit, "data, place", text, tl=tl)[(1,)](data, place)
        assert int(place) == data.data_ptr()
