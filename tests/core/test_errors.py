"""The error hierarchy."""

import inspect
import pickle

from tables import table

from iris_core import errors

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
BASES = {
    LookupError: "PluginNotFound", ImportError: "PluginLoad", ValueError: "Settings NotOnHeap",
    MemoryError: "HeapExhausted", NotImplementedError: "Unsupported", RuntimeError: "Device Heap",
    TimeoutError: "DeviceTimeout CollectiveTimeout",
    errors.PluginError: "PluginNotFound PluginLoad PluginConflict",
    errors.HeapError: "HeapExhausted NotOnHeap Symmetry HeapClosed",
}  # fmt: skip


def test_every_class_is_an_iris_error_with_a_docstring_and_stands_in_the_overview():
    assert len(CLASSES) > 15
    for cls in CLASSES:
        assert issubclass(cls, errors.IrisError)
        assert cls.__doc__, cls
        assert cls.__name__ in errors.__doc__, cls
    for base, names in BASES.items():
        assert all(issubclass(getattr(errors, f"{name}Error"), base) for name in names.split()), base
    assert not issubclass(errors.CapabilityError, errors.PluginError)


@table(("error", "text"), [
    (errors.PluginNotFoundError("no 'x'", name="x", close_matches=["y"]), "no 'x'"),
    (errors.NoUsablePluginError("none", reasons={"a": "b"}), "none"),
    (errors.DriverError("cuMemMap", 1, "CUDA_ERROR_X", "hint"), "cuMemMap failed with CUDA_ERROR_X (1): hint"),
    (errors.HeapExhaustedError("full", requested_bytes=3, free_bytes=2, largest_free_bytes=1), "full"),
    (errors.CollectiveTimeoutError("late", missing_ranks=[2]), "late"),
    (errors.PeerLostError("gone", ranks=[1]), "gone"),
])  # fmt: skip
def test_texts_and_attributes_survive_the_way_from_another_process(error, text):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) == text
    assert vars(copy) == vars(error)
