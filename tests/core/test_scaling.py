"""The model of several nodes: its limits, its bytes, and `iris bench model`."""

import math

import pytest
from tables import table

from iris_core.cli import main
from iris_core.world.scaling import OPS, Level, Machine

FREE = Level(0.0, math.inf)


def test_one_node_has_no_rail_and_one_gpu_no_node():
    slow = Level(1.0, 1.0)
    for op in OPS:
        assert Machine(1, rail=slow).seconds(op, 1 << 20) == Machine(1).seconds(op, 1 << 20)
        assert Machine(4, 1, node=slow, rail=FREE).seconds(op, 1 << 20) == 0


@table(("op", "flat", "on_rail", "in_node"), [
    ("all_gather", False, 3 / 4 / 8, None), ("reduce_scatter", False, 3 / 4 / 8, None),
    ("all_reduce", False, 2 * 3 / 4 / 8, None), ("all_gather", True, 31 / 32 / 8, None),
    ("all_to_all", False, 3 / 4, 7 / 32), ("all_to_all", True, 3 / 4, 7 / 32),  # direct messages
])  # fmt: skip
def test_the_bytes_of_a_rail_and_of_a_node(op, flat, on_rail, in_node):
    level = Level(0.0, 100.0)
    assert Machine(4, 8, FREE, level).seconds(op, 1e6, flat=flat) == pytest.approx(1e4 * on_rail)
    if in_node is not None:
        assert Machine(4, 8, level, FREE).seconds(op, 1e6, flat=flat) == pytest.approx(1e4 * in_node)
        assert Machine(4, 8, level, level).seconds(op, 1e6, flat=flat) == pytest.approx(1e4 * max(on_rail, in_node))


def test_both_levels_work_at_the_same_time_but_for_one_chunk():
    node, rail = Level(0.0, 1e9), Level(0.0, 1e9)
    alone = [Machine(2, 4, each, other).seconds("all_gather", 1e9) for each, other in ((node, FREE), (FREE, rail))]
    assert Machine(2, 4, node, rail).seconds("all_gather", 1e9) == pytest.approx(max(alone) + min(alone) / 4)


def test_a_step_hides_all_layers_but_one():
    machine = Machine(2, 2, Level(0.0, 1e9), FREE)
    gather_s, scatter_s = (machine.seconds("all_gather", size * 1e9 / 10) for size in (2, 4))
    assert machine.step_seconds(100.0, 1e9, 10) == pytest.approx(100.0 + gather_s + scatter_s)
    assert machine.step_seconds(0.0, 1e9, 10) == pytest.approx(19 * gather_s + 10 * scatter_s)


def test_the_command(capsys):
    assert main(["bench", "model", "--gpus", "4", "--rail-gbs", "12.5"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line in OPS] == list(OPS)
    machine = Machine(128, 4, rail=Level(Machine(1).rail.latency_s, 12.5e9))
    assert f"{machine.seconds('all_to_all', 1 << 30) * 1e6:,.0f}" in out
