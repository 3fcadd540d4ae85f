"""`ctx.ops.all_reduce_rms_norm`: what stands between two layers, in one launch."""

import jobs_norm as jobs
import pytest
from jobs_ccl import late_inside
from jobs_norm import Case
from jobs_sequences import captured

from iris_triton.gemm.packet_norm import shape_of

KERNELS = ["one_shot", "two_shot"]
PACKETS = ["sentinel_one_shot", "sentinel_two_shot"]


def cases():
    """Every algorithm with every kind of tensors; rows and columns that nothing divides."""
    for algorithm in (*KERNELS, "unfused", ""):
        yield Case(algorithm, (7, 200))
        yield Case(algorithm, (1, 64), "float32", place="heap")
    for algorithm in KERNELS:
        yield Case(algorithm, (2, 5, 96), "float16", weight="float32", programs=3)
        yield Case(algorithm, (5, 33), "float32", place="skewed")
        yield Case(algorithm, (9, 128), out="float8_e4m3fn", programs=2)
        yield Case(algorithm, (3, 40), "float16", out="float8_e5m2")
    for dtype, out in (("bfloat16", ""), ("float16", "float8_e4m3fn"), ("float32", "")):
        for algorithm in PACKETS:
            yield Case(algorithm, (5, 200), dtype, out, weight="float32", programs=2)
            yield Case(algorithm, (1, 8), dtype, out)
    for dtype, out in (("bfloat16", "float8_e4m3fn"), ("float32", "")):  # four programs of a row, one of none
        yield Case("sentinel_one_shot", (2, 256), dtype, out, programs=9)
    yield Case("unfused", (2, 3, 40), "float32", out="float8_e4m3fn")


@pytest.mark.parametrize(("num_ranks", "group"), [
    (1, None), pytest.param(2, None, marks=pytest.mark.exhaustive(device="cpu")), (3, None), (4, [3, 1, 0]),
    pytest.param(4, None, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_results(pool, some, device, num_ranks, group):
    every = [case for case in cases() if num_ranks > 1 or case.algorithm in ("", "unfused")]
    turns = 2 if group or device != "cpu" else 1
    if device == "cpu":  # others in a group
        every = some(every, 5, 1) if group else some(every, 2 if num_ranks > 1 else 1)
    assert pool.run(jobs.run_cases, num_ranks, device, every, turns, group) == [[]] * num_ranks


@pytest.mark.parametrize("algorithm", [*KERNELS, *PACKETS])
@pytest.mark.parametrize("num_ranks", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_that_are_late(pool, tmp_path, num_ranks, algorithm):
    """Shapes change from call to call, and with them which program has which memory; all have the first one's."""
    shapes = [(5, 24, 4), (1, 16, 4), (2, 16, 1), (5, 24, 4)]
    every = [Case(algorithm, (rows, hidden), "float32", programs=programs) for rows, hidden, programs in shapes]
    share = 0.03 if algorithm in PACKETS else 0.4  # packets are many
    args = str(tmp_path / "changes"), share, jobs.run_cases, "cpu", every
    assert pool.run(late_inside, num_ranks, *args) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2])
@pytest.mark.parametrize("job", [jobs.same_bits, jobs.layers])
def test_bits_of_algorithms_and_gradients_of_layers(pool, device, num_ranks, job):
    assert pool.run(job, num_ranks, device) == [None] * num_ranks


def test_first_calls_measure(pool, tmp_path):
    assert pool.run(jobs.measured, 2, str(tmp_path)) == [None] * 2


def test_what_is_refused(pool):
    assert pool.run(jobs.refused, 2) == [None] * 2


@pytest.mark.parametrize("warps", [None, 1, 4, 16, 32])
def test_each_thread_has_packets_of_its_own(warps):
    """Where two hold the same one, the first clears what the second waits for: 64 packets of 4 warps hung on GPUs."""
    for row in range(1, 2049):
        block, given = shape_of(row, warps)
        assert block >= max(row, 32 * given)
        assert block & (block - 1) == 0
        assert warps in (None, given)


@pytest.mark.multigpu
@pytest.mark.parametrize("algorithm", [*KERNELS, *PACKETS])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graphs(pool, num_ranks, algorithm):
    assert pool.run(captured, num_ranks, "cuda", [Case(algorithm, (12, 512))], 200) == [[]] * num_ranks
