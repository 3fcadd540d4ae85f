"""Calls one after the other, beside each other, in groups, in pieces; wrong calls."""

import pytest
from ccl_cases import OPS, Case
from jobs_sequences import (
    against_gloo,
    asynchronous,
    back_to_back,
    different,
    explained,
    in_groups,
    in_pieces,
    in_tiles,
    messages,
    observed,
    refused,
    stays_away,
)
from rank_counts import rank_counts


def all_right(results):
    for wrong in results:
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [4])
def test_groups_of_any_ranks_in_any_order(pool, num_ranks, device):
    sets = [[0, 3], [3, 1], [2, 0, 1], [3, 0], [1, 2, 3, 0], [2]]
    all_right(pool.run(in_groups, num_ranks, device, sets, 5 if device == "cuda" else 3))


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2, 8]))
def test_back_to_back(pool, num_ranks, device):
    calls = 10_000 if device == "cuda" else 60
    all_right(pool.run(back_to_back, num_ranks, device, calls, 24 if device == "cuda" else 12, False, timeout_s=300.0))


@pytest.mark.parametrize("num_ranks", [4])
def test_slow_ranks(pool, num_ranks, device):
    calls = 500 if device == "cuda" else 30
    all_right(pool.run(back_to_back, num_ranks, device, calls, 10, True))


@pytest.mark.parametrize("num_ranks", [3])
def test_what_is_larger_than_the_workspace_goes_in_pieces(pool, num_ranks, device):
    cases = [Case(op, shape=(3, 701), place="ordinary") for op in OPS]
    cases += [Case("all_reduce", "int8", shape=(5000,), place=place) for place in ("input only", "output only")]
    cases += [Case("all_reduce", shape=(3, 701), place="ordinary", config={"algorithm": "one_shot"})]
    cases += [Case("all_to_all", splits="uneven", shape=(900, 3), place="ordinary")]
    all_right(pool.run(in_pieces, num_ranks, device, cases, "4KiB"))


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[4]))
def test_the_same_as_torch_distributed(pool, num_ranks, device):
    all_right(pool.run(against_gloo, num_ranks, device, num_ranks, 40, timeout_s=300.0))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_layout_of_tiles(pool, num_ranks, device):
    all_right(pool.run(in_tiles, num_ranks, device))


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_messages_between_two_ranks(pool, num_ranks, device):
    all_right(pool.run(messages, num_ranks, device, 3 if device == "cuda" else 1))


@pytest.mark.parametrize("num_ranks", [2])
def test_asynchronous_calls(pool, num_ranks, device):
    for means, completed, gathered, reused, barrier in pool.run(asynchronous, num_ranks, device):
        assert means == [1.0, 3.0, 5.0, 7.0]
        assert completed
        assert gathered == [0.0, 1.0]
        assert reused == [1.0]
        assert barrier


@pytest.mark.parametrize("num_ranks", [2])
def test_wrong_calls_are_refused_before_anything_is_launched(pool, num_ranks, device):
    parts = {
        "shape": ("ArgumentError: all_reduce: the output has shape (5, 4), the input (6, 4)",),
        "dtype": ("ArgumentError", "torch.int32", "torch.float32"),
        "device": ("DeviceError", "all_reduce: the output is on meta"),
        "no tensor": ("TypeError: all_reduce: the input must be a torch tensor, not list",),
        "reduction": ("ArgumentError", "'median'", "known are SUM"),
        "bitwise": ("ArgumentError: all_reduce: BAND works on integers and bool",),
        "average of bool": ("ArgumentError: all_reduce: AVG does not work on bool",),
        "complex": ("UnsupportedError: all_reduce: elements of torch.complex64 cannot be reduced",),
        "overlap": ("ArgumentError: all_reduce: input and output overlap",),
        "gradient": ("ArgumentError: all_reduce: writes into its output, so torch cannot record it for gradients",),
        "gradient of the output": ("ArgumentError: broadcast: writes into its output",),
        "shared memory": ("ArgumentError", "share memory"),
        "gathered": ("ArgumentError: all_gather", "the output must be (12, 4) or (2, 6, 4)"),
        "scattered": ("ArgumentError: reduce_scatter", "the input must be (12, 4) or (2, 6, 4)"),
        "indivisible": ("ArgumentError: all_to_all", "must be divisible by the 2 members"),
        "splits": ("ArgumentError: all_to_all: input_split_sizes=[1, 1] must be 2 numbers that add up",),
        "columns": ("ArgumentError: all_to_all", 'with layout="columns"'),
        "layout": ("ArgumentError: all_to_all: layout must be one of torch, columns, not 'rows'",),
        "in place": ("ArgumentError: all_to_all: input and output overlap; it does not work in place",),
        "root": ("ArgumentError: broadcast: rank 2 is not in the group of ranks 0, 1",),
        "kind of root": ("TypeError: broadcast: a root is a rank, not '0'",),
        "no output": ("ArgumentError", "is the root and must pass the output"),
        "algorithm": ("ArgumentError: all_reduce: there is no algorithm 'magic'", "two_shot, one_shot"),
        "contradiction": ("ArgumentError: Config: algorithm='two_shot' contradicts all_reduce_variant='one_shot'",),
        "config": ("TypeError: all_reduce: config must be an iris_core.ccl.Config, not dict",),
        "unused": ("UnsupportedError: all_reduce: algorithm 'two_shot' cannot serve this call", "swizzle_size"),
        "closed": ("HeapClosedError",),
    }
    for rank, said in enumerate(pool.run(refused, num_ranks, device)):
        for name, expected in parts.items():
            for part in expected:
                assert part in said[name]
        if rank == 0:
            assert "rank 0 is not a member of the process group" in said["stranger"]


@pytest.mark.parametrize(("what", "part"), [
    ("shape", "elements: 12 on rank 0; 12 on rank 1; 16 on rank 2"),
    ("operation", "operation: all_reduce on rank 0; all_reduce on rank 1; reduce on rank 2"),
    ("place", "input on the heap and contiguous: True on rank 0; True on rank 1; False on rank 2"),
    ("root", "root: 0 on rank 0; 0 on rank 1; 1 on rank 2"),
    ("algorithm", "algorithm: two_shot on rank 0; two_shot on rank 1; one_shot on rank 2"),
])  # fmt: skip
@pytest.mark.parametrize("num_ranks", [3])
def test_ranks_that_call_differently_are_told(pool, num_ranks, what, part, device):
    for said in pool.run(different, num_ranks, device, what):
        assert said.startswith("RankMismatchError")
        assert part in said


@pytest.mark.parametrize("num_ranks", [3])
def test_a_rank_that_stays_away_is_named(pool, num_ranks, device):
    first, second, third = pool.run(stays_away, num_ranks, device)
    assert [sums for _, sums in (first, second, third)] == [[3.0]] * 3
    for said, _ in (first, second, third):
        assert said.startswith("DeviceTimeoutError")
        assert (
            "where rank 1 signals program 0 that it has arrived" in said or "where the data of rank 1 arrives" in said
        )
        assert "the collectives of ranks 0, 1, 2, whose last call on rank " in said
    assert "has reported: " in second[0]


@pytest.mark.parametrize("num_ranks", [2])
def test_observers_hear_of_launches(pool, num_ranks, device):
    for heard in pool.run(observed, num_ranks, device):
        assert [(op, nbytes) for op, _, nbytes in heard] == [("all_reduce", 40), ("broadcast", 40)]
        assert heard[1][1] == "pull"


@pytest.mark.parametrize("num_ranks", [2])
def test_explain(pool, num_ranks, device):
    for text, algorithm, names, refused_text in pool.run(explained, num_ranks, device):
        assert {"one_shot", "two_shot", "local"} <= set(names)
        assert algorithm in names
        assert f"all_reduce: {algorithm}, " in text
        assert "local (local): no, it serves groups of one rank, and this group has 2" in text
        assert "no algorithm" in refused_text
        assert "it has no use for num_xcds of the config" in refused_text
