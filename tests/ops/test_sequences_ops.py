"""Many calls one after the other, in groups, beside each other, in graphs; calls that are refused."""

import re

import pytest
from jobs_sequences_ops import (
    ENGINES,
    asynchronous,
    back_to_back,
    captured,
    different,
    equal_bits,
    in_groups,
    refused,
    without_room,
    workspaces,
)
from ops_cases import OPS, Case, algorithms, dims
from rank_counts import rank_counts


@pytest.mark.parametrize("num_ranks", [4])
def test_groups_of_any_ranks_in_any_order(pool, num_ranks, device):
    for wrong in pool.run(in_groups, num_ranks, device, [[3, 1], [2, 0, 3], [2], [1, 3, 0, 2]], 4):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_back_to_back_with_changing_data(pool, num_ranks, device):
    kinds, calls = (5, 12) if device == "cpu" else (12, 300)
    for wrong in pool.run(back_to_back, num_ranks, device, kinds, calls, True, timeout_s=300.0):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [3])
def test_all_ranks_get_the_same_bits(pool, num_ranks, device):
    results = pool.run(equal_bits, num_ranks, device)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_asynchronous_calls(pool, num_ranks, device):
    for wrong in pool.run(asynchronous, num_ranks, device):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_workspaces(pool, num_ranks, device):
    for said in pool.run(workspaces, num_ranks, device):
        assert [name for name, holds in said.items() if not holds] == []
        assert "after close" in said


@pytest.mark.parametrize("num_ranks", [2])
@pytest.mark.parametrize("deterministic", [False, True])
def test_without_room(pool, num_ranks, device, deterministic):
    for *said, right in pool.run(without_room, num_ranks, device, deterministic):
        assert len(said) == 2
        assert all("no room for them" in text for text in said)
        assert right != deterministic


@pytest.mark.parametrize(("what", "text"), [
    ("shape", "product: 8 x 8 times 8 x 8 on rank 0; 8 x 8 times 8 x 4 on rank 1"),
    ("config", "algorithm: two_shot on rank 0; unfused on rank 1"),
    ("bias", "bias along: none on rank 0; columns on rank 1"),
    ("dtypes", "times float8_e4m3fn to float32 on rank 0; float8_e4m3fn times float8_e5m2 to float32 on rank 1"),
    ("place", "the output on the heap, with dense rows at multiples of 16 bytes: True on rank 0; False on rank 1"),
])  # fmt: skip
@pytest.mark.parametrize("num_ranks", [2])
def test_ranks_that_call_differently(pool, num_ranks, device, what, text):
    for said, result in pool.run(different, num_ranks, device, what):
        assert said.startswith("RankMismatchError")
        assert text in said
        assert result == [8.0 * num_ranks]


REFUSED = {
    "shape": "ArgumentError: matmul_all_reduce: .* the output must be \\(12, 6\\)",
    "inner": "as many columns as B has rows", "vector": "A must be a matrix", "nothing": "inner dimension is 0",
    "dtype": "A has dtype float32, B float16", "out dtype": "the output has dtype float16",
    "double": "UnsupportedError: .*float64 are not multiplied",
    "integers": "UnsupportedError: .*int32 are not multiplied", "device": "DeviceError",
    "no tensor": "TypeError: .*B must be a torch tensor", "bias": "must be \\(6,\\), \\(1, 6\\) or \\(12, 1\\)",
    "bias along rows": "bias\\[:, None\\]", "bias dtype": "the bias has dtype float16",
    "overlap": "the output and A share memory", "shared memory": "share memory",
    "gaps": "the output and A share memory", "negated": "lazily negated",
    "families": "UnsupportedError: .*no device multiplies",
    "variant": "ArgumentError: .*names an algorithm of matmul_all_reduce",
    "fetchers of another": "no use for num_fetch_sms", "gradients": "iris_core.nn, or call it under torch.no_grad",
    "config": "TypeError: .*FusedConfig", "workspace": "TypeError: .*FusedWorkspace",
    "algorithm": "there is no algorithm 'magic'; there are unfused, two_shot, copy_engine",
    "ring": "there is no algorithm 'ring'", "unused": "no use for num_fetch_sms", "block": "block_size_m is 48",
    "indivisible": "must divide the 11 rows", "scattered": "must be \\(6, 6\\)",
    "tiles": 'with layout="tiles" the output must be \\(12, 6\\)', "layout": "layout must be one of torch, tiles",
    "gathered": "they fit gather_dim=0", "dim": "gather_dim must be 0", "gathered after": "they fit gather_dim=0",
    "fetchers": "num_sms must be the larger number", "gluon": "UnsupportedError: .*not written in Gluon",
    "operation": "'matmul' is no operation", "closed": "HeapClosedError",
    "explain": "all_gather_matmul: \\w+, the cheapest by its model\n  unfused .*us, model\n  fetch .*\n  copy_engine",
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2])
def test_refused_calls(pool, num_ranks, device):
    for said in pool.run(refused, num_ranks, device):
        assert said.keys() == REFUSED.keys()
        wrong = {name: said[name] for name, text in REFUSED.items() if not re.search(text, said[name], re.DOTALL)}
        assert not wrong


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_replays_with_changing_data(pool, num_ranks):
    cases = [
        Case(op, algorithm, (130, 264, 96), "bfloat16", place=place, out_place=place, dim=dim, bias="columns")
        for op in OPS
        for algorithm in (*algorithms(op, num_ranks), *ENGINES.get(op, ()))
        for dim in (dims(op)[:1] if algorithm in ENGINES.get(op, ()) else dims(op))
        for place in ("heap", "ordinary")
    ]
    for said, wrong in pool.run(captured, num_ranks, "cuda", cases, 50, timeout_s=500.0):
        assert len(said) == 1
        assert wrong == []
