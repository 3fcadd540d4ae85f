"""The kit passes on the reference implementations: the host allocator, the Triton backend, and both together.

The allocator and the stack are the example of docs/conformance_kit.md, word for word.
"""

import pathlib
import re

from iris_core.testing import AllocatorConformance, BackendConformance, StackConformance

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "conformance_kit.md"
exec(re.search(r"## An example\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1))


class TestTritonBackend(BackendConformance):
    name = "triton"
    case_step = 25  # tests/compile has all of them


def test_the_example_is_about_both():
    allocator, stack = globals()["TestMyAllocator"], globals()["TestMyAllocatorWithTriton"]
    assert issubclass(allocator, AllocatorConformance)
    assert allocator.name == stack.allocator == "host"
    assert issubclass(stack, StackConformance)
    assert stack.backend == "triton"
