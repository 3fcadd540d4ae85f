"""A process without peers, and the error hierarchy."""

import inspect
import pickle

import pytest
from tables import raises, table

from iris_core import errors
from iris_core.errors import IrisError, RankMismatchError, SettingsError, UnsupportedError
from iris_core.world import connect
from iris_core.world.rendezvous import divide, group_by_node


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    """What torchrun may set, and has not."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


def test_a_process_alone_is_a_world_of_one(environ, caplog):
    environ("RANK", "0")
    connect(None, 1.0)
    environ("WORLD_SIZE", "2")  # half of torchrun's variables is not torchrun
    world = connect(None, 1.0)
    (warning,) = caplog.messages
    assert "MASTER_ADDR and MASTER_PORT" in warning
    assert (world.rank, world.world_size) == (0, 1)
    assert (world.all_gather_ints([1, 2]), world.broadcast_object("x", 0)) == ([(1, 2)], "x")
    with raises(ValueError, "no rank", rank=1, size=1):
        world.broadcast_object("x", 1)
    with raises(IrisError, name="group="):
        connect(object(), 1.0)


@table(("variables", "error", "key"), [
    ({"RANK": "2", "WORLD_SIZE": "2"}, RankMismatchError, "names"),
    ({"RANK": "-1", "WORLD_SIZE": "1"}, RankMismatchError, "names"), ({"RANK": "x"}, RankMismatchError, "any"),
    *((each, UnsupportedError, "names") for each in ({"LOCAL_WORLD_SIZE": "1"}, {"IRIS_NODES": "1+1"})),
])  # fmt: skip
def test_variables_of_torchrun_that_cannot_be_followed(monkeypatch, variables, error, key):
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for each in (usual | variables).items():
        monkeypatch.setenv(*each)
    with raises(error, key, name=next(iter(variables))):
        connect(None, 1.0)


def test_divisions_into_nodes():
    hosts = divide("2x2", 4), divide("3+1", 4), divide("", 2), ["b", "a", "b"]
    assert [*map(group_by_node, hosts)] == [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 1),), ((0, 2), (1,))]
    with raises(SettingsError, name="IRIS_NODES"):
        divide("2x3", 4)


CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
BASES = {
    LookupError: "PluginNotFound", ImportError: "PluginLoad", ValueError: "Settings NotOnHeap",
    MemoryError: "HeapExhausted", NotImplementedError: "Unsupported", RuntimeError: "Device Heap",
    TimeoutError: "DeviceTimeout CollectiveTimeout",
    errors.PluginError: "PluginNotFound PluginLoad PluginConflict",
    errors.HeapError: "HeapExhausted NotOnHeap Symmetry HeapClosed",
}  # fmt: skip


def test_every_class_is_an_iris_error_and_stands_in_the_overview():
    assert len(CLASSES) > 15
    for cls in CLASSES:
        assert issubclass(cls, errors.IrisError)
        assert cls.__name__ in errors.__doc__, cls
    for base, names in BASES.items():
        assert all(issubclass(getattr(errors, f"{name}Error"), base) for name in names.split()), base
    assert not issubclass(errors.CapabilityError, errors.PluginError)


@table(("error", "text"), [
    (errors.PluginNotFoundError("no 'x'", name="x", close_matches=["y"]), "no 'x'"),
    (errors.DriverError("cuMemMap", 1, "CUDA_ERROR_X", "hint"), "cuMemMap failed with CUDA_ERROR_X (1): hint"),
    (errors.HeapExhaustedError("full", requested_bytes=3, free_bytes=2, largest_free_bytes=1), "full"),
    (errors.DeviceTimeoutError("gave up", rank=1, peer=0, op="all_reduce"), "gave up"),
])  # fmt: skip
def test_texts_and_attributes_survive_the_way_from_another_process(error, text):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) == text
    assert vars(copy) == vars(error)
