"""The pages on writing plugins show what is in the example's files, and name every member of the protocols."""

from __future__ import annotations

import inspect
import re

import pytest

from iris_core import hooks, protocols
from iris_core.testing.conformance.backend import FUNCTIONS

from .excerpts import ROOT, shown

PAGES = ("write_an_allocator", "write_a_backend", "write_a_collective")
TEXT = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in PAGES}
PROSE = {name: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for name, text in TEXT.items()}

REQUIRED = {
    "write_an_allocator": (
        protocols.Allocator,
        protocols.SupportsGrowth,
        protocols.SupportsDecommit,
        protocols.SupportsImportTensor,
    ),
    "write_a_backend": (
        protocols.DeviceBackend,
        protocols.MemoryMap,
        protocols.SupportsDemos,
        protocols.SupportsDeviceBarrier,
        protocols.SupportsSelfTest,
    ),
    "write_a_collective": (protocols.Collective, protocols.Work),
}


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_are_the_files(page):
    blocks = list(shown(TEXT[page]))
    assert len(blocks) == len(re.findall(r"^```\w+$", TEXT[page], re.MULTILINE)), "every block has a marker"
    for marker, there, file in blocks:
        assert there == file, f"{marker}: write the pages again with python tests/docs/excerpts.py docs/{page}.md"


@pytest.mark.parametrize("page", PAGES)
def test_every_member_of_the_protocols_is_named(page):
    known = {"info", "rank", "version", "nbytes"}  # of the plugin, and of any memory
    for protocol in REQUIRED[page]:
        for name, _ in inspect.getmembers_static(
            protocol, lambda each: inspect.isroutine(each) or isinstance(each, property)
        ):
            if not name.startswith("_") and name not in known:
                assert re.search(rf"\b{name}\b", PROSE[page]), f"{protocol.__name__}.{name}"


def test_every_hook_is_on_the_first_page():
    for hook in (*hooks.PROVIDER_HOOKS, *hooks.OPTIONAL_PROVIDER_HOOKS):
        assert f"| `{hook}` |" in PROSE["write_an_allocator"]


def test_every_device_function_is_named():
    assert [name for name in FUNCTIONS if f"`{name}`" not in PROSE["write_a_backend"]] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_point_to_files(page):
    links = re.findall(r"\]\(([^)#]+)", PROSE[page])
    assert links
    for link in links:
        assert (ROOT / "docs" / link).exists(), link
