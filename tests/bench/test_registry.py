"""Registering benchmarks, their axes, and what is refused."""

import subprocess
import sys

import pytest
from tables import table

from iris_core import bench
from iris_core.bench import registry
from iris_core.errors import BenchmarkError


def find(name):
    return registry.BENCHMARKS[name]


def named(name="f", value=0):
    """A function of its own, registered nowhere."""

    def function(state, ctx):
        return value

    function.__name__ = function.__qualname__ = name
    return function


def test_importing_the_package_is_light():
    program = "import sys; from iris_core.bench import *; assert not {'torch', 'triton'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_every_public_name_exists_and_is_documented():
    for name in bench.__all__:
        assert getattr(bench, name).__doc__


def test_a_name_is_file_and_function_and_the_function_stays_what_it_is():
    @bench.register
    def copy(state, ctx):
        """Copies things.

        At length.
        """

    (found,) = bench.registered()
    assert found.name == "test_registry.copy"
    assert found.about == "Copies things."
    assert found.function is copy
    assert found.ranks
    assert registry.BENCHMARKS["test_registry.copy"] is found


def test_points_are_the_product_of_the_axes_and_the_upper_axis_changes_slowest():
    @bench.register
    @bench.axis("nbytes", (1, 2))
    @bench.axis("sem", ["relaxed", "release"])
    def two_axes(state, ctx):
        """Two axes."""

    points = list(find("test_registry.two_axes").points(bench.RunOptions()))
    assert [tuple(each.values()) for each in points] == [(1, "relaxed"), (1, "release"), (2, "relaxed"), (2, "release")]
    assert list(points[0]) == ["nbytes", "sem"]


def test_values_of_an_axis_may_depend_on_the_run_and_be_replaced():
    @bench.register
    @bench.axis("rank", lambda options: range(options.num_ranks))
    def ranks(state, ctx):
        """As many points as ranks."""

    benchmark = find("test_registry.ranks")
    assert list(benchmark.points(bench.RunOptions(num_ranks=3))) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert list(benchmark.points(bench.RunOptions(num_ranks=3, axes={"rank": [7]}))) == [{"rank": 7}]


def test_two_functions_of_one_name_are_refused_and_both_places_are_named():
    bench.register(name="same")(named("first"))
    with pytest.raises(BenchmarkError, match=r"two benchmarks are called 'same': \S+:\d+ and \S+:\d+"):
        bench.register(name="same")(named("second"))


def test_the_same_function_may_come_again_as_when_its_module_is_reloaded():
    first, again = named("same"), named("same")
    bench.register(first)
    bench.register(again)
    assert find("test_registry.same").function is again


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [("two words", [1], "name in Python"), ("num_ranks", [1], "reserved"), ("x", [], "no values")],
)
def test_axes_that_are_refused(name, values, text):
    with pytest.raises(BenchmarkError, match=text):
        bench.axis(name, values)


def test_an_axis_twice_is_refused():
    with pytest.raises(BenchmarkError, match="two axes 'x'"):
        bench.axis("x", [1])(bench.axis("x", [2])(named()))


def test_values_for_an_axis_that_no_benchmark_has_are_refused():
    bench.register(bench.axis("nbytes", [1])(named()))
    with pytest.raises(BenchmarkError, match=r"no chosen benchmark has an axis 'nbyte'; there are: nbytes"):
        registry.check_axes(bench.registered(), {"nbyte": [1]})
    with pytest.raises(BenchmarkError, match="no values"):
        registry.check_axes(bench.registered(), {"nbytes": []})
    registry.check_axes(bench.registered(), {"nbytes": [2]})


def test_choosing_by_pattern():
    bench.register(named("one"))
    bench.register(by_default=False)(named("two"))
    assert [each.name for each in bench.registered()] == ["test_registry.one"]
    assert [each.name for each in bench.registered(pattern="two")] == ["test_registry.two"]
    assert bench.registered(source="/elsewhere.py") == []
    with pytest.raises(BenchmarkError, match=r"no benchmark matches 'three'; there are: test_registry.one, "):
        bench.registered(pattern="three")
    with pytest.raises(BenchmarkError, match="not a regular expression"):
        bench.registered(pattern="(")


def test_loading_a_file_makes_its_folder_importable_and_happens_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside.py").write_text("NAME = 'from_beside'")
    file = tmp_path / "some_benchmarks.py"
    file.write_text(
        "import beside\nfrom iris_core import bench\n"
        "@bench.register(name=beside.NAME)\ndef f(state, ctx):\n    '''About.'''\n"
    )
    bench.load(str(file))
    first = find("from_beside")
    bench.load(str(file))
    assert find("from_beside") is first


def test_loading_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(BenchmarkError, match="is not a Python file"):
        bench.load(str(tmp_path / "missing.py"))


def test_a_file_that_raises_leaves_no_half_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "broken.py"
    file.write_text("raise KeyError('broken')")
    before = set(sys.modules)
    with pytest.raises(KeyError, match="broken"):
        bench.load(str(file))
    assert not [name for name in set(sys.modules) - before if "broken" in name]


def test_ranges():
    assert bench.power_of_two(1, 8) == [1, 2, 4, 8]
    assert bench.power_of_two(4096, 4096) == [4096]
    assert bench.linear_range(0, 6, 3) == [0, 3, 6]
    assert bench.linear_range(1, 3, 4) == [1]
    for first, last in ((3, 8), (1, 6), (8, 4), (0, 4)):
        with pytest.raises(BenchmarkError):
            bench.power_of_two(first, last)
    for first, last, step in ((1, 3, 0), (3, 1, 1)):
        with pytest.raises(BenchmarkError):
            bench.linear_range(first, last, step)


@table(
    ("name", "value"),
    [
        *(("num_ranks", 0), ("rounds", 0), ("warmup", -1), ("repeat", 0), ("batch_ms", 0), ("warm_ms", -1)),
        ("limit_s", 0),
    ],
)
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(BenchmarkError, match=name):
        bench.RunOptions(**{name: value})
