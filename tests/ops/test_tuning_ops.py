"""Tables of fused operations are measured on verified data, and used."""

import pytest
import torch
from jobs_tuning_ops import chosen, samples, tune
from tables import table

from iris_core.cli import main
from iris_core.dispatch.tables import read_table
from iris_core.errors import ArgumentError
from iris_core.tuning.matmuls import KINDS, LAYERS, FusedSample, FusedTuneOptions


@pytest.mark.parametrize("num_ranks", [2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_samples_tell_right_from_wrong(pool, num_ranks, dtype, device):
    algorithm = None if dtype.startswith("float8") else "unfused"  # which does not multiply those
    for answers in pool.run(samples, num_ranks, device, dtype, algorithm):
        assert set(answers) == set(KINDS)
        assert set(answers.values()) == {(True, True, True, False, False)}


def test_all_ranks_find_the_same(pool, device):
    wanted = {"ops": ("matmul_all_gather",), "layers": ((16, 32, 48), (64, 32, 48))}
    first, second = pool.run(tune, 2, device, wanted)
    assert first == second
    assert not first.wrong
    assert not first.passed_over
    kinds = {(row["gather_dim"], row["size"]) for row in first.entries}
    assert kinds == {(0, (8, 32, 48)), (0, (32, 32, 48)), (1, (16, 16, 48)), (1, (64, 16, 48))}
    assert all(row["seconds"] > 0 and row["dtype"] == "bfloat16" for row in first.entries)


def test_wrong_data_is_left_out_and_named(pool):
    wanted = {"ops": ("matmul_all_reduce",), "dtypes": ("tf32",), "layers": ((16, 32, 48),)}
    for found in pool.run(tune, 2, "cpu", wanted, "two_shot"):
        assert found.entries
        assert {row["dtype"] for row in found.entries} == {"float32"}  # CPUs have no TF32
        assert "two_shot" not in {row["algorithm"] for row in found.entries}
        assert "matmul_all_reduce two_shot at 16 x 16 times 16 x 48 tf32: ranks 0, 1" in found.wrong


def test_what_cannot_be_launched_is_left_out(pool):
    wanted = {"ops": ("matmul_all_reduce",), "layers": ((16, 32, 48),)}
    for found in pool.run(tune, 2, "cpu", wanted, "two_shot", 100.0, True):
        assert not found.wrong
        assert not found.passed_over
        assert "two_shot" not in {row["algorithm"] for row in found.entries} != set()


def test_after_the_limit_nothing_is_begun(pool):
    wanted = {"ops": ("matmul_all_reduce",), "layers": ((16, 32, 48), (32, 32, 48))}
    for found in pool.run(tune, 2, "cpu", wanted, "", 1e-6):
        assert found.entries == ()
        assert len(found.passed_over) == 2
        assert all("the limit of 0 s was reached" in each for each in found.passed_over)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"ops": ("all_reduce",)}, "no operation all_reduce can be tuned"),
    ({"dtypes": ("float64",)}, "no element type float64"), ({"ops": ("matmul_all_reduce",) * 2}, "each operation once"),
    ({"layers": ()}, "layers must be given"), ({"layers": ((0, 1, 1),)}, "of positive sizes"),
])  # fmt: skip
def test_options_that_cannot_be(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        FusedTuneOptions(**wrong)


def test_what_is_measured():
    found = [point.sample for point in FusedTuneOptions().points(0, 8)]
    assert len(found) == len(KINDS) * len(LAYERS) == len(set(found))
    sizes = [sample.heap_nbytes for sample in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 12 << 30
    shapes = {(sample.op, sample.gather_dim): sample.shape for sample in found if 8192 in sample.shape}
    assert FusedSample.of_layer("all_gather_matmul", 1, torch.half, 1, 8, (512, 64, 80)).a_shape == (512, 10)
    assert set(shapes) == set(KINDS)
    with pytest.raises(ArgumentError, match="3 ranks cannot divide 8192 rows and a weight of 28672 x 8192"):
        FusedTuneOptions().points(0, 3)
    with pytest.raises(ArgumentError, match="2 ranks cannot divide 5"):
        FusedSample("all_gather_matmul", 1, torch.half, 0, 2, (4, 4, 5))
    with pytest.raises(ArgumentError, match="2 ranks cannot divide 5"):
        FusedSample("matmul_reduce_scatter", None, torch.half, 0, 2, (5, 4, 4))


@pytest.mark.slow
def test_the_command_writes_what_calls_use(pool, forked_ranks, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    arguments = ["tune", "--ops", "--device", "cpu", "--ranks", "2", "--op", "matmul_all_reduce"]
    assert main([*arguments, "--shape", "40x32x48"]) == 0
    path = tmp_path / "ops" / "cpu-2.json"
    assert f"written to {path}" in capsys.readouterr().out
    rows = sorted(read_table(path).entries, key=lambda row: row.seconds)
    (said, _) = pool.run(chosen, 2, str(tmp_path), 40, 48, 16)
    assert said == (rows[0].algorithm, f"measured as the fastest in {path}")


@table(("arguments", "message"), [
    (["--shape", "4x4x4"], "--shape is one of fused operations"),
    (["--ops", "--shape", "4x4"], "--shape 4x4: a shape is three numbers"),
    (["--ops", "--shape", "4x0x4"], "a shape is three numbers"),
    (["--ops", "--max", "1MiB", "--min", "2"], "--min, --max: fused operations have shapes"),
    (["--ops", "--op", "all_reduce"], "no operation all_reduce"),
    (["--ops", "--device", "cpu"], "give small ones by --shape"),
    (["--ops", "--device", "cpu", "--ranks", "3", "--shape", "6x4x4"], "3 ranks cannot divide"),
])  # fmt: skip
def test_the_command_refuses_what_cannot_be(arguments, message, capsys):
    assert main(["tune", *arguments]) == 1
    assert message in capsys.readouterr().err
