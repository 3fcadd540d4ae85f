"""The pages on writing plugins show what is in the example's files, and name every member of the protocols."""

import inspect
import re

from tables import table

from iris_core import hooks, protocols
from iris_core.testing.conformance.backend import FUNCTIONS

from .excerpts import ROOT, shown

PAGES = ("write_an_allocator", "write_a_backend", "write_a_collective")
TEXT = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in PAGES}
PROSE = {name: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for name, text in TEXT.items()}

REQUIRED = {
    "write_an_allocator": "Allocator SupportsGrowth SupportsDecommit SupportsImportTensor",
    "write_a_backend": "DeviceBackend MemoryMap SupportsDemos SupportsDeviceBarrier SupportsSelfTest",
    "write_a_collective": "Collective Work",
}


@table("page", PAGES)
def test_code_blocks_are_the_files(page):
    blocks = list(shown(TEXT[page]))
    assert len(blocks) == len(re.findall(r"^```\w+$", TEXT[page], re.MULTILINE)), "every block has a marker"
    for marker, there, file in blocks:
        assert there == file, f"{marker}: write the pages again with python tests/docs/excerpts.py docs/{page}.md"


@table("page", PAGES)
def test_every_member_of_the_protocols_is_named(page):
    known = {"info", "rank", "version", "nbytes"}  # of the plugin, and of any memory
    for protocol in REQUIRED[page].split():
        for name, value in inspect.getmembers_static(getattr(protocols, protocol)):
            named = name.startswith("_") or name in known or re.search(rf"\b{name}\b", PROSE[page])
            assert named or not (inspect.isroutine(value) or isinstance(value, property)), f"{protocol}.{name}"


def test_every_hook_and_every_device_function_is_named():
    for hook in (*hooks.PROVIDER_HOOKS, *hooks.OPTIONAL_PROVIDER_HOOKS):
        assert f"| `{hook}` |" in PROSE["write_an_allocator"]
    assert [name for name in FUNCTIONS if f"`{name}`" not in PROSE["write_a_backend"]] == []
