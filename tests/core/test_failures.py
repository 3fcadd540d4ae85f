"""A process without peers, and what all ranks refuse together."""

import pytest
from tables import table

from iris_core.errors import IrisError, RankMismatchError, SettingsError, UnsupportedError
from iris_core.world import SingleWorld, connect
from iris_core.world.failures import check_agreement
from iris_core.world.nodes import divide, group_by_node


class ThreeRanks(SingleWorld):
    """Answers for three ranks, of which the last differs."""

    world_size = 3

    def __init__(self, *others):
        self._others = others

    def all_gather_object(self, obj):
        return [obj, *self._others]


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    """What torchrun may set, and has not."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


def test_a_process_alone_is_a_world_of_one():
    world = connect(None, 1.0)
    assert (world.rank, world.world_size) == (0, 1)
    assert world.all_gather_ints([1, 2]) == [(1, 2)]
    assert world.broadcast_object("x", 0) == "x"
    with pytest.raises(ValueError, match="there is no rank 1 in a world of 1"):
        world.broadcast_object("x", 1)


def test_half_of_torchruns_variables_is_not_torchrun(environ):
    environ("RANK", "0")
    environ("WORLD_SIZE", "2")
    assert connect(None, 1.0).world_size == 1


@table(("rank", "world_size"), [("2", "2"), ("x", "2"), ("-1", "1")])
def test_impossible_variables_of_torchrun(environ, rank, world_size):
    for name, value in {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        environ(name, value)
    with pytest.raises(RankMismatchError, match=r"RANK=|no number"):
        connect(None, 1.0)


@pytest.mark.parametrize(("name", "value"), [("LOCAL_WORLD_SIZE", "1"), ("IRIS_NODES", "1+1")])
def test_several_nodes_need_torch_distributed(environ, name, value):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1", name: value}
    for each in variables.items():
        environ(*each)
    with pytest.raises(UnsupportedError, match=rf"{name}.*call torch.distributed.init_process_group\(\) before Iris"):
        connect(None, 1.0)


def test_divisions_into_nodes():
    assert group_by_node(divide("2x2", 4)) == ((0, 1), (2, 3))
    assert group_by_node(divide("3+1", 4)) == ((0, 1, 2), (3,))
    assert group_by_node(divide("", 2)) == ((0, 1),)
    assert group_by_node(["b", "a", "b"]) == ((0, 2), (1,))
    for text in ("2x", "0x2", "a", "2+0", "2x3"):
        with pytest.raises(SettingsError, match="IRIS_NODES="):
            divide(text, 4)


def test_a_group_without_torch_distributed():
    with pytest.raises(IrisError, match="not initialised"):
        connect(object(), 1.0)


def test_agreement():
    facts = {"heap_size": "1", "torch": "2"}
    check_agreement(ThreeRanks(facts, facts), facts)
    with pytest.raises(RankMismatchError) as caught:
        check_agreement(ThreeRanks(facts, {"heap_size": "1", "torch": "3"}), facts)
    assert "torch: 2 on ranks 0, 1; 3 on rank 2" in str(caught.value)
    assert "heap_size" not in str(caught.value)


def test_a_fact_that_only_one_rank_knows():
    with pytest.raises(RankMismatchError, match="extra: absent on ranks 0, 1; 5 on rank 2"):
        check_agreement(ThreeRanks({"a": "1"}, {"a": "1", "extra": "5"}), {"a": "1"})
