"""Plugins that are wrong on purpose, one mistake each.  Found through entry points that test_mutants installs."""

import functools
import inspect


def suite(base, name, tests, **attributes):
    """A third party's test class, as docs/conformance_kit.md shows it, with some of the tests."""
    left_out = {test for test in dir(base) if test.startswith("test_")} - tests
    return type(f"Test_{name}", (base,), {**dict.fromkeys(left_out), **attributes})


def wrong(base, **changes):
    """A class that is `base` but for some methods.

    Each is a function of (self, the base's method, its arguments); what is not a function stands in the class as it is.
    """

    def method(name, function):
        original = getattr(base, name)

        @functools.wraps(original)
        def call(self, *args, **named):
            given = inspect.signature(original).bind(self, *args, **named).args[1:]
            return function(self, functools.partial(original, self), *given)

        return call

    members = {name: method(name, each) if inspect.isfunction(each) else each for name, each in changes.items()}
    return type(f"Wrong{base.__name__}", (base,), members)
