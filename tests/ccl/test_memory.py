"""The system area of the heap, and the memory of teams."""

import itertools

import pytest
import torch
from jobs_memory import areas, groups_beside_allocations, off_the_heap, regions, used_before, what_a_group_gets
from rank_counts import rank_counts
from tables import table

from iris_triton.collectives.parts.sizes import carrier_of, columns_first, layout_of


def test_ranges_of_the_system_area(pool):
    results = pool.run(areas, 3, "cpu")
    ranges = {}
    for rank, (places, said, unchanged, nbytes) in enumerate(results):
        assert nbytes >= 64 << 10
        assert "of the heap's system area" in said
        assert "IRIS_SYSTEM_SIZE" in said
        assert unchanged
        for members, begin in places.items():
            assert ranges.setdefault(members, begin) == begin  # the same on all members
            assert begin % 256 == 0
            assert rank in members
    for (one, first), (other, second) in itertools.combinations(ranges.items(), 2):
        if set(one) & set(other):
            assert first + 1000 * len(one) <= second or second + 1000 * len(other) <= first


@pytest.mark.parametrize(("system_size", "workspace"), [("1MiB", "64KiB"), ("128KiB", "256KiB")])
def test_regions_of_teams(pool, system_size, workspace):
    results = pool.run(regions, 3, "cpu", system_size, workspace)
    for index in (0, 1):
        rows = [found[index] for found in results if len(found) > index]
        assert len({tuple(row["offsets"]) for row in rows}) == 1
        for row in rows:
            assert (row["same"], row["filled"], row["place"]) == (True, True, True)
            assert row["sizes"][:3] == [1000, 1000, 5000]
            assert 4096 <= row["sizes"][3] <= (256 << 10)
            assert "workspace 'huge' of a collective needs" in row["huge"]
    assert [found[1]["rank"] for found in (results[2], results[0])] == [(0, 2, (2, 0)), (1, 2, (2, 0))]


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_control_words_are_zero_where_memory_was_in_use(pool, num_ranks, device):
    for found in pool.run(used_before, num_ranks, device):
        assert found == [[num_ranks * (num_ranks + 1) / 2]] * num_ranks


@pytest.mark.parametrize("num_ranks", [4])
def test_a_group_gets_what_a_world_of_its_size_gets(pool, num_ranks, device):
    worlds = pool.run(what_a_group_gets, 2, device, [(0, 1)])
    groups = pool.run(what_a_group_gets, num_ranks, device, [(0, 2), (3, 1)])
    assert worlds[0] == worlds[1]
    assert groups == [worlds[0]] * num_ranks
    assert worlds[0][1] == [4 << 20, 16 << 20]


@pytest.mark.parametrize("num_ranks", [4])
def test_regions_of_groups_and_allocations_never_overlap(pool, num_ranks, device):
    results = pool.run(groups_beside_allocations, num_ranks, device)
    offsets = {}
    for wrong, counts, places, free in results:
        assert wrong == []
        assert counts == results[0][1]
        assert 0 < free <= 8 << 20
        for name, offset in places.items():
            assert offsets.setdefault(name, offset) == offset  # the same on all members
    assert sum(offset is not None for offset in offsets.values()) >= 8 or device != "cpu"


def test_kernels_reach_the_memory_of_groups(pool, device):
    *members, other = pool.run(off_the_heap, 3, device)
    assert [found for found, _ in members] == [[True] * 4] * 2
    assert other == ([], [])
    for _, labels in members:
        assert any("workspace" in label for label in labels)


@table(("shape", "stride", "dims"), [
    ((), (), 0), ((5,), (1,), 0), ((5,), (2,), 1), ((5, 3), (3, 1), 0), ((5, 3), (1, 5), 2), ((5, 3), (6, 2), 1),
    ((5, 1, 3), (3, 77, 1), 0), ((2, 5, 3), (40, 3, 1), 2), ((2, 5, 3), (0, 3, 1), 2), ((0, 4), (9, 2), 0),
])  # fmt: skip
def test_layouts(shape, stride, dims):
    layout = layout_of(shape, stride)
    assert layout.num_dims == dims
    numbers = torch.arange(1000)
    wanted = numbers.as_strided(shape, stride).flatten()
    if dims:
        assert torch.equal(numbers.as_strided(layout.sizes, layout.strides).flatten(), wanted)
    else:
        assert torch.equal(numbers[: wanted.numel()], wanted)


def test_columns_come_one_chunk_behind_the_other():
    matrix = torch.arange(24).view(4, 6)
    chunks = matrix.as_strided(*columns_first(matrix.shape, matrix.stride(), 3))
    assert torch.equal(chunks, torch.stack(matrix.chunk(3, dim=1)))


@table("dtype", ["bool", "float8_e4m3fn", "bfloat16", "float32", "complex64", "complex128", "uint32"])
def test_carriers_are_views_of_the_same_bytes(dtype):
    tensor = torch.arange(12).to(getattr(torch, dtype)).view(3, 4)[:, ::2]
    carrier = carrier_of(dtype)
    view = carrier.view(tensor)
    shape, stride = carrier.extend(tensor.shape, tensor.stride())
    assert (tuple(view.shape), view.stride()) == (shape, stride)
    assert view.data_ptr() == tensor.data_ptr()
    assert view.dtype.itemsize * carrier.parts == tensor.dtype.itemsize
