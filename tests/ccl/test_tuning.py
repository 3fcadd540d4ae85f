"""Tables of collectives are measured on verified data, and used."""

from dataclasses import replace

import pytest
from jobs_tuning import chosen, samples, tune
from rank_counts import rank_counts

from iris_core.cli import main
from iris_core.dispatch.tables import Entry, read_table, write_table
from iris_core.errors import ArgumentError
from iris_core.tuning.collectives import OPS, TuneOptions


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
@pytest.mark.parametrize(("nbytes", "dtype"), [(1, "int8"), (5000, "bfloat16")])
def test_samples_tell_right_from_wrong(pool, num_ranks, nbytes, dtype, device):
    unit = num_ranks * 16
    whole = max(unit, nbytes // unit * unit)
    for rank, answers in enumerate(pool.run(samples, num_ranks, device, nbytes, dtype)):
        for op in OPS:
            size, seen = answers[op]
            assert size == whole
            idle = (rank and op in ("reduce", "gather")) or (not rank and op == "broadcast")
            assert seen == (None if idle else [True, False, False]), op


def test_all_ranks_find_the_same(pool, device):
    wanted = {"ops": ("all_reduce", "scatter"), "dtypes": ("float32", "int32"), "max_nbytes": 2500}
    first, second = pool.run(tune, 2, device, wanted)
    assert first == second
    assert first.passed_over == tuple(
        f"scatter at {nbytes} bytes: there is nothing to choose from" for nbytes in (2048, 1024) * 2
    )
    assert not first.wrong
    for dtype in ("*", "int32"):
        rows = [each for each in first.entries if each.dtype == dtype]
        assert {each.op for each in rows} == {"all_reduce"}
        assert {(each.size, each.place) for each in rows} == {((1024,), "heap"), ((2048,), "heap")}
        assert all(each.seconds > 0 for each in rows)


def test_wrong_data_is_left_out_and_named(pool):
    wanted = {"ops": ("all_reduce",), "dtypes": ("float32",), "max_nbytes": 1024}
    for found in pool.run(tune, 2, "cpu", wanted, "one_shot"):
        assert found.entries
        assert "one_shot" not in {each.algorithm for each in found.entries}
        assert "all_reduce one_shot at 1024 bytes: ranks 0, 1" in found.wrong


@pytest.mark.parametrize(("wrong", "message"), [
    ({"ops": ("all_shuffle",)}, "no operation all_shuffle can be tuned"),
    ({"dtypes": ("uint8",)}, "no element type uint8"), ({"dtypes": ()}, "one at least"),
    ({"ops": ("reduce", "reduce")}, "each operation once"),
    ({"min_nbytes": 64, "max_nbytes": 32}, "from 64 to 32 bytes"),
])  # fmt: skip
def test_options_that_cannot_be(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        TuneOptions(**wrong)


def test_sizes():
    for bounds, sizes in (((1024, 8192), [8192, 4096, 2048, 1024]), ((1024, 4095), [2048, 1024]), ((64, 64), [64])):
        wanted = TuneOptions(ops=("reduce",), min_nbytes=bounds[0], max_nbytes=bounds[1])
        assert [each.sample.nbytes for each in wanted.points(0, 2)] == sizes


@pytest.mark.slow
def test_the_command_writes_what_calls_use(pool, forked_ranks, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    arguments = ["tune", "--device", "cpu", "--ranks", "2", "--op", "all_reduce", "--max", "1KiB"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    path = tmp_path / "ccl" / "cpu-2.json"
    assert f"written to {path}" in shown
    fastest = read_table(path).entries[0]
    (said, _) = pool.run(chosen, 2, str(tmp_path))
    assert said == (fastest.algorithm, f"measured as the fastest in {path}")
    assert {each.name for each in tmp_path.iterdir()} == {"ccl"}
    own = tmp_path / "own.json"
    write_table(own, "cpu", 2, {}, [Entry("reduce", "*", (1024,), "pull", 1.0), *(replace(fastest, seconds=9.0),) * 2])
    assert main([*arguments, "--op", "scatter", "--out", str(own)]) == 0
    entries = read_table(own).entries
    assert entries[-1].op == "reduce"  # what was not measured again stays
    assert entries[0].op == "all_reduce"
    assert entries[0].seconds < 9.0


@pytest.mark.parametrize(("arguments", "message"), [
    (["--max", "many"], "--max many: a size is"),
    (["--ranks", "1", "--device", "cpu"], "one rank leaves nothing to choose"),
    (["--ranks", "1000", "--device", "cuda"], "1000 ranks need as many GPUs"),
    (["--op", "magic"], "no operation magic"),
])  # fmt: skip
def test_the_command_refuses_what_cannot_be(arguments, message, capsys):
    assert main(["tune", *arguments]) == 1
    assert message in capsys.readouterr().err
