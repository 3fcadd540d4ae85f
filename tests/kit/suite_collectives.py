"""The kit on every mutant of a collective; run by test_mutants in a process of its own."""

import pytest
from kit_mutants import suite
from kit_mutants.killers import COLLECTIVES as KILLERS
from kit_mutants.killers import RUN_ALL, functions_about
from kit_mutants.plugins import COLLECTIVES

from iris_core.testing import CollectiveConformance
from iris_core.testing.conformance import collective

TESTS = {name for name in dir(CollectiveConformance) if name.startswith("test_")}
ALWAYS = {"test_static_protocol", "test_static_info_is_complete"}
OF_OPS = ALWAYS | {"test_host_supports_always_answers", "test_world_calls"}
"""What shows that an operation is computed right; the rest is the same for all of them."""
OF_PUSH = OF_OPS | {"test_world_of_a_group"}


class Few(CollectiveConformance):
    """What mistakes and operations are about: an everyday call, no elements and one, other roots, halves, in place."""

    @pytest.fixture(autouse=True)
    def few_cases(self, monkeypatch, every=collective.cases):
        def few(op, size):
            return [
                each
                for each in every(op, size)
                if each == collective.usual(op)
                or max(each.shape) < 2
                or each.root
                or each.in_place
                or "16" in each.dtype
            ]

        monkeypatch.setattr(collective, "cases", few)


for _name, _plugin in COLLECTIVES.items():
    if _name in KILLERS:
        _tests = ALWAYS | functions_about(KILLERS[_name])
    else:
        _tests = {"right-all-reduce": TESTS, "right-push": OF_PUSH}.get(_name, OF_OPS)
    _base = CollectiveConformance if _name == "right-all-reduce" or RUN_ALL else Few
    _made = {"plugin": pytest.fixture(lambda self, plugin=_plugin: plugin), "allocator": "host", "backend": "triton"}
    globals()[f"Test_{_name}"] = suite(_base, _name, _tests - {"test_static_import_is_light"}, **_made)
