"""What a file of benchmarks may declare, and what is refused."""

from tables import raises, table

from iris_core import bench
from iris_core.bench import registry
from iris_core.bench.registry import parse_axis
from iris_core.bench.state import State
from iris_core.errors import BenchmarkError


def nothing(state=None, ctx=None):
    """A call, and a benchmark."""


def named(name):
    function = lambda state, ctx: None
    function.__name__ = function.__qualname__ = name
    return function


def a_state(on_gpu=False):
    state = State("copy", {"nbytes": 4, "sem": "relaxed"}, bench.RunOptions(), on_gpu, nothing)
    state.provider("a", nothing, check=None)
    state.add_counter("n", 1)
    return state


@table(("text", "values"), [
    ("n=1,2.5,name", [1, 2.5, "name"]), ("n=pow2:4:16", [4, 8, 16]), ("n=pow2:1:1", [1]), ("n=lin:1:9:4", [1, 5, 9]),
    ("n=lin:1:3:4", [1]), ("n=lin:-2:0:2", [-2, 0]), ("n=7", [7]),
])  # fmt: skip
def test_values_of_axes(text, values):
    assert parse_axis(text) == ("n", values)


def chosen(axes):
    options = bench.RunOptions(axes=axes)
    registry.check_axes([registry.Benchmark("f", bench.axis("nbytes", [1])(named("f")))], options)


WHOLE = ("num_ranks", 2.5), ("repeat", 1.5)
LEAST = ("num_ranks", 0), ("rounds", 0), ("warmup", -1), ("repeat", 0), ("batch_ms", 0), ("warm_ms", -1), ("limit_s", 0)
SET = ("bytes", 0), ("flops", -1), ("repeat", 0), ("rounds", 0), ("warmup", -1)
NO_AXES = ("n", "n=", "=1", "two words=1", "n=pow2:4", "n=lin:1:2", "n=pow2:a:b", "n=pow2:3:8", "n=pow2:1:6",
           "n=pow2:8:4", "n=pow2:0:4", "n=lin:1:3:0", "n=lin:3:1:1")  # fmt: skip
REFUSED = [
    (lambda: bench.axis("two words", [1]), "an axis"), (lambda: bench.axis("x", ()), "no values"),
    (lambda: bench.axis("x", []), "no values"), (lambda: chosen({"nbytes": []}), "nothing left"),
    (lambda: [bench.register(name="same")(named(each)) for each in ("first", "second")], "two benchmarks"),
]  # fmt: skip
REFUSED_BY_STATE = [
    (lambda s: s.set_timer("events"), "gpu"), (lambda s: s.set_timer("graph"), "gpu"),
    (lambda s: (s.providers.clear(), s.check()), "no provider"),
    (lambda s: s.target("a", "time_us"), "one bound"),
    (lambda s: s.target("a", "time_us", at_least=1, at_most=2), "one bound"),
]  # fmt: skip
NAMED = [
    *((lambda name=name, value=value: bench.RunOptions(**{name: value}), name) for name, value in LEAST + WHOLE),
    *((lambda name=name, value=value: getattr(a_state(), f"set_{name}")(value), name) for name, value in SET),
    *((lambda text=text: parse_axis(text), "") for text in NO_AXES),
    (lambda: a_state().provider("b", nothing, check=None, operations=0), "operations"),
    (lambda: chosen({"nbyte": [1]}), "'nbyte'"), (lambda: bench.registered(pattern="("), "'('"),
    (lambda: (bench.register(nothing), bench.registered(pattern="three")), "'three'"),
    *((lambda step=step: step(a_state()), name) for step, name in (
        (lambda s: s["dtype"], "'dtype'"), (lambda s: s.set_timer("sundial"), "'sundial'"),
        (lambda s: s.skip_provider("a", "no reason"), "'a'"), (lambda s: s.add_counter("n", 2), "'n'"),
        (lambda s: (s.provider("c", nothing, check=None, baseline="b"), s.check()), "'b'"),
        (lambda s: (s.target("c", "time_us", at_most=1), s.check()), "'c'"),
        (lambda s: s.target("a", "speed", at_least=1), "'speed'"))),
    (lambda: bench.axis("x", [1])(bench.axis("x", [2])(named("f"))), "'x'"),
    (lambda: bench.load("/no/such/file.py"), "/no/such/file.py"),
]  # fmt: skip


@table(("step", "key"), [*REFUSED, *((lambda step=step: step(a_state()), key) for step, key in REFUSED_BY_STATE)])
def test_what_is_refused(step, key):
    with raises(BenchmarkError, f"bench.{key}"):
        step()


@table(("step", "name"), NAMED)
def test_what_is_refused_by_name(step, name):
    with raises(BenchmarkError, name=name):
        step()


def test_a_state():
    state, on_gpu = a_state(), a_state(on_gpu=True)
    assert (state["nbytes"], state.get("sem"), state.get("dtype", "f32")) == (4, "relaxed", "f32")
    for each, timer in ((state, "reported"), (on_gpu, "graph")):
        each.set_timer(timer)
        each.provider("b", nothing, check=None, baseline="a")
        each.check()
    timers = [[each.timer for each in one.providers.values()] for one in (state, on_gpu)]
    assert timers == [["cpu", "reported"], ["events", "graph"]]
