"""Granules of addresses, numbers in cells, and tables that are full; each against what is said plainly."""

import contextlib

import numpy as np
import pytest

from iris_core.errors import IrisError
from iris_core.world import World
from iris_triton.checker import shared
from iris_triton.checker.histories import different, replaced
from iris_triton.checker.places import place_of
from iris_triton.checker.shared import Tables


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
def test_numbers_in_cells_are_found_and_replaced(high):
    cells = np.random.default_rng(1).choice([3, 5, high], 100).astype(np.uint32)
    assert different(cells) == sorted({3, 5, high})
    assert (replaced(cells, {3: 1, 5: 2, high: 7}) == np.where(cells == 3, 1, np.where(cells == 5, 2, 7))).all()


def test_a_full_table_is_an_error():
    with contextlib.closing(Tables(World(), 1 << 16)) as tables:
        tables.counters[shared.CLOCKS] = 1 << 20
        with tables, pytest.raises(IrisError, match="clocks"):
            tables.take(shared.CLOCKS)
