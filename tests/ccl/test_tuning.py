"""Tables of collectives and of fused operations are measured on verified data, and used."""

import contextlib
import dataclasses
import tempfile
from dataclasses import replace
from unittest import mock

import pytest
import torch
from jobs_ccl import on_heap
from jobs_common import environment
from tables import table

from iris_core import Iris
from iris_core.bench import RunOptions
from iris_core.cli import main
from iris_core.dispatch.tables import Entry, read_table, write_table
from iris_core.errors import ArgumentError
from iris_core.ops import FusedConfig
from iris_core.tuning.samples import KINDS, LAYERS, SPOILED, FusedSample, FusedTuneOptions, TuneOptions
from iris_core.tuning.tuner import tune_on_this_rank
from iris_triton.collectives.pull_reduce import PullReduce
from iris_triton.gemm.matmul_reduce import Reduce


@on_heap("16MiB")
def samples(ctx, wanted, algorithm=None):
    """Each operation's result is right; with a wrong end it is not, and spoiled neither."""
    for sample, config, *_ in wanted.points(ctx.cur_rank, ctx.num_ranks):
        with ctx.scope():
            out, *inputs = tensors = sample.tensors(ctx)
            if sample.op == "broadcast":
                tensors = [inputs[0] if out is None else out]
            face = ctx.ops if isinstance(config, FusedConfig) else ctx.ccl
            how = {"config": dataclasses.replace(config, algorithm=algorithm), **sample.options}
            getattr(face, sample.op)(*tensors, **how)
            assert sample.is_right(out), sample
            if out is not None:
                assert out.any(), sample
                out.view(-1)[-1] += 1
                assert not sample.is_right(out), sample
                out.fill_(SPOILED)
                assert not sample.is_right(out), sample


CLASSES = {"one_shot": PullReduce, "two_shot": Reduce}  # of all_reduce, and of matmul_all_reduce


def tune(device, wanted, broken="", limit_s=100.0, refuses=False):
    """Tune, with an algorithm that launches nothing, or that cannot be launched; every rank's findings."""
    kind = FusedTuneOptions if "layers" in wanted else TuneOptions
    no_room = RuntimeError("out of resource: shared memory\nand more")
    launch = mock.Mock(side_effect=no_room if refuses else None)
    options = RunOptions(num_ranks=2, device=device, heap_size="24MiB", limit_s=limit_s)
    with (
        mock.patch.object(CLASSES[broken], "launch", launch) if broken else contextlib.nullcontext(),
        tempfile.TemporaryDirectory() as cache,
        environment(IRIS_TUNE="exhaustive", IRIS_CACHE_DIR=cache),  # as `iris tune` runs ranks
    ):
        found = tune_on_this_rank(kind(**wanted), options)
    return dataclasses.replace(found, entries=tuple(dataclasses.asdict(each) for each in found.entries))


def chosen(cache, *shape):
    """With tables in a folder: (algorithm, why) of an all_reduce, or of a matmul_all_reduce of this shape."""
    with environment(IRIS_CACHE_DIR=cache), Iris("1MiB", device="cpu") as ctx:
        if shape:
            m, n, k = shape
            tensors = (ctx.ones(*each, dtype=torch.bfloat16) for each in ((m, n), (m, k), (k, n)))
            found = ctx.ops.explain("matmul_all_reduce", *tensors)
        else:
            x = ctx.ones(4, dtype=torch.float32)
            found = ctx.ccl.explain("all_reduce", x, x)
        return found.algorithm, found.why


SMALL, LARGE = (TuneOptions(dtypes=(dtype,), min_nbytes=nbytes, max_nbytes=nbytes)
                for dtype, nbytes in (("int8", 1), ("bfloat16", 5000)))  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "wanted", "algorithm"), [
    (3, SMALL, None), (3, LARGE, None),
    *(pytest.param(2, wanted, None, marks=pytest.mark.exhaustive(device="cpu")) for wanted in (SMALL, LARGE)),
    *((2, FusedTuneOptions(dtypes=(dtype,), layers=((20, 32, 48),)), algorithm) for dtype, algorithm in (
        ("bfloat16", "unfused"), ("float32", "unfused"), ("float8_e4m3fn", None))),  # which "unfused" does not multiply
])  # fmt: skip
def test_samples_tell_right_from_wrong(pool, num_ranks, wanted, algorithm, device):
    assert pool.run(samples, num_ranks, device, wanted, algorithm) == [None] * num_ranks


def test_all_ranks_find_the_same(pool, device):
    wanted = {"ops": ("all_reduce", "scatter"), "dtypes": ("float32", "int32"), "max_nbytes": 2500}
    first, second = pool.run(tune, 2, device, wanted)
    assert first == second
    nothing, sizes = "there is nothing to choose from", {"all_reduce": (1024, 2048)}
    if device == "cuda":
        sizes["scatter"] = (1024,)  # of a part, and the least of which there are entries
    else:
        assert first.passed_over == tuple(f"scatter at {nbytes} bytes: {nothing}" for nbytes in (2048, 1024) * 2)
    assert not first.wrong
    points = {(row["op"], row["dtype"], row["size"], row["place"]) for row in first.entries}
    assert points == {(op, dtype, (n,), "heap") for op in sizes for dtype in ("*", "int32") for n in sizes[op]}
    assert all(row["seconds"] > 0 for row in first.entries)
    wanted = {"ops": ("matmul_all_gather",), "layers": ((16, 32, 48), (64, 32, 48))}
    first, second = pool.run(tune, 2, device, wanted)
    assert first == second
    assert (first.wrong, first.passed_over) == ((), ())
    kinds = {(row["gather_dim"], row["size"]) for row in first.entries}
    assert kinds == {(0, (8, 32, 48)), (0, (32, 32, 48)), (1, (16, 16, 48)), (1, (64, 16, 48))}
    assert all(row["seconds"] > 0 and row["dtype"] == "bfloat16" for row in first.entries)


LAYER = ((16, 32, 48),)


@pytest.mark.parametrize(("wanted", "broken", "dtype", "text"), [
    ({"ops": ("all_reduce",), "dtypes": ("float32",), "max_nbytes": 1024}, "one_shot", "*",
     "all_reduce one_shot at 1024 bytes: ranks 0, 1"),
    ({"ops": ("matmul_all_reduce",), "dtypes": ("tf32",), "layers": LAYER}, "two_shot", "float32",  # CPUs have no TF32
     "matmul_all_reduce two_shot at 16 x 16 times 16 x 48 tf32: ranks 0, 1"),
    ({"ops": ("matmul_all_reduce",), "layers": LAYER}, "two_shot", "bfloat16", ""),  # which cannot be launched
])  # fmt: skip
def test_wrong_data_is_left_out_and_named(pool, wanted, broken, dtype, text):
    for found in pool.run(tune, 2, "cpu", wanted, broken, 100.0, not text):
        assert {row["dtype"] for row in found.entries} == {dtype}
        assert broken not in {row["algorithm"] for row in found.entries}
        assert text in found.wrong if text else found.wrong == found.passed_over == ()


def test_after_the_limit_nothing_is_begun(pool):
    wanted = {"ops": ("matmul_all_reduce",), "layers": (*LAYER, (32, 32, 48))}
    for found in pool.run(tune, 2, "cpu", wanted, "", 1e-6):
        assert (found.entries, len(found.passed_over)) == ((), 2)
        assert all("the limit of 0 s was reached" in each for each in found.passed_over)


@table(("options", "wrong", "message"), [
    (TuneOptions, {"ops": ("all_shuffle",)}, "no operation all_shuffle can be tuned"),
    (TuneOptions, {"dtypes": ("uint8",)}, "no element type uint8"), (TuneOptions, {"dtypes": ()}, "one at least"),
    (TuneOptions, {"ops": ("reduce", "reduce")}, "each operation once"),
    (TuneOptions, {"min_nbytes": 64, "max_nbytes": 32}, "from 64 to 32 bytes"),
    (FusedTuneOptions, {"ops": ("all_reduce",)}, "no operation all_reduce can be tuned"),
    (FusedTuneOptions, {"dtypes": ("float64",)}, "no element type float64"),
    (FusedTuneOptions, {"ops": ("matmul_all_reduce",) * 2}, "each operation once"),
    (FusedTuneOptions, {"layers": ()}, "layers must be given"),
    (FusedTuneOptions, {"layers": ((0, 1, 1),)}, "of positive sizes"),
])  # fmt: skip
def test_options_that_cannot_be(options, wrong, message):
    with pytest.raises(ArgumentError, match=message):
        options(**wrong)


def test_layers():
    found = [point.sample for point in FusedTuneOptions().points(0, 8)]
    assert len(found) == len(KINDS) * len(LAYERS) == len(set(found))
    sizes = [sample.heap_nbytes for sample in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 12 << 30
    assert {(sample.op, sample.gather_dim) for sample in found if 8192 in sample.shape} == set(KINDS)
    assert FusedSample.of_layer("all_gather_matmul", 1, torch.half, 1, 8, (512, 64, 80)).a_shape == (512, 10)
    with pytest.raises(ArgumentError, match="3 ranks cannot divide 8192 rows and a weight of 28672 x 8192"):
        FusedTuneOptions().points(0, 3)
    for op, dim, shape in (("all_gather_matmul", 1, (4, 4, 5)), ("matmul_reduce_scatter", None, (5, 4, 4))):
        with pytest.raises(ArgumentError, match="2 ranks cannot divide 5"):
            FusedSample(op, dim, torch.half, 0, 2, shape)


@pytest.mark.slow
def test_the_command_writes_what_calls_use(pool, forked_ranks, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    on_two = ["--device", "cpu", "--ranks", "2"]
    arguments = ["tune", *on_two, "--op", "all_reduce", "--max", "1KiB"]
    assert main(arguments) == 0
    assert main(["tune", "--ops", *on_two, "--op", "matmul_all_reduce", "--shape", "40x32x48"]) == 0
    shown = capsys.readouterr().out
    for engine, shape in (("ccl", ()), ("ops", (40, 48, 16))):
        path = tmp_path / engine / "cpu-2.json"
        assert f"written to {path}" in shown
        fastest = min(read_table(path).entries, key=lambda row: row.seconds).algorithm
        found = pool.run(chosen, 2, str(tmp_path), *shape)
        assert found[0] == (fastest, f"measured as the fastest in {path}")
    assert {each.name for each in tmp_path.iterdir()} == {"ccl", "ops"}
    fastest, own = read_table(tmp_path / "ccl" / "cpu-2.json").entries[0], tmp_path / "own.json"
    write_table(own, "cpu", 2, [], [Entry("reduce", "*", (1024,), "pull", 1.0), *(replace(fastest, seconds=9.0),) * 2])
    assert main([*arguments, "--op", "scatter", "--out", str(own)]) == 0
    entries = read_table(own).entries
    assert entries[-1].op == "reduce"  # what was not measured again stays
    assert entries[0].op == "all_reduce"
    assert entries[0].seconds < 9.0
