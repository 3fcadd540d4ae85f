"""The error hierarchy."""

from __future__ import annotations

import inspect
import pickle

from tables import table

from iris_core import errors

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]

EXAMPLES = [
    errors.PluginNotFoundError("no 'x'", name="x", close_matches=["y"]),
    errors.NoUsablePluginError("none", reasons={"a": "b"}),
    errors.DriverError("cuMemMap", 1, "CUDA_ERROR_INVALID_VALUE", "hint"),
    errors.HeapExhaustedError("full", requested_bytes=3, free_bytes=2, largest_free_bytes=1),
    errors.CollectiveTimeoutError("late", missing_ranks=[2]),
    errors.PeerLostError("gone", ranks=[1]),
]


def test_every_class_is_an_iris_error_with_a_docstring_and_stands_in_the_overview():
    assert len(CLASSES) > 15
    for cls in CLASSES:
        assert issubclass(cls, errors.IrisError)
        assert cls.__doc__, cls
        assert cls.__name__ in errors.__doc__, cls


@table(("cls", "standard"), [
    (errors.PluginNotFoundError, LookupError), (errors.PluginLoadError, ImportError),
    (errors.SettingsError, ValueError), (errors.UnsupportedError, NotImplementedError),
    (errors.DeviceError, RuntimeError), (errors.DeviceTimeoutError, TimeoutError), (errors.HeapError, RuntimeError),
    (errors.HeapExhaustedError, MemoryError), (errors.NotOnHeapError, ValueError),
    (errors.CollectiveTimeoutError, TimeoutError),
])  # fmt: skip
def test_standard_errors_catch_ours(cls, standard):
    assert issubclass(cls, standard)


def test_groups():
    for cls in (errors.PluginNotFoundError, errors.PluginLoadError, errors.PluginConflictError):
        assert issubclass(cls, errors.PluginError)
    for cls in (errors.HeapExhaustedError, errors.NotOnHeapError, errors.SymmetryError, errors.HeapClosedError):
        assert issubclass(cls, errors.HeapError)
    assert not issubclass(errors.CapabilityError, errors.PluginError)


def test_the_message_of_not_found_is_not_quoted_like_a_key():
    assert str(EXAMPLES[0]) == "no 'x'"


def test_driver_error_says_call_name_and_code():
    assert str(EXAMPLES[2]) == "cuMemMap failed with CUDA_ERROR_INVALID_VALUE (1): hint"


@table("error", EXAMPLES)
def test_attributes_survive_the_way_from_another_process(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
