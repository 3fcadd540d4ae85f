"""A user installs iris-gluon from wheels and has no repository: what it requires is there, and everything works."""

import importlib.metadata
import json
import re
import zipfile

import pytest

from .workspace import FOLDERS, ROOT, project

pytestmark = pytest.mark.slow


def test_the_wheels_have_every_file_and_nothing_else(wheels):
    for folder in FOLDERS:
        (wheel,) = wheels.glob(f"{folder}-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        packed = {name for name in names if ".dist-info/" not in name}
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
        source = wheels.parent / "sources" / folder / "src"  # the copies: somebody may be at work on the originals
        files = (path for path in (source / folder).rglob("*") if path.is_file())
        assert packed == {str(path.relative_to(source)) for path in files}
        assert f"{folder}/py.typed" in packed


def test_pip_finds_what_it_requires(gluon_only):
    program = "import importlib.metadata as m, sys; print(*[d.name for d in m.distributions(path=sys.argv[1:])])"
    installed = gluon_only.output("python", "-c", program, gluon_only.site_packages)
    assert sorted(installed.split()) == sorted(project(folder)["name"] for folder in FOLDERS)


def test_what_nobody_requires_is_not_there(gluon_only):
    """Or else an import that is not declared would work in this environment, and fail in a user's."""
    known = {"torch", "numpy", "pluggy", "pydantic", "rich", "triton"}
    present = {each for each in importlib.metadata.packages_distributions() if each.isidentifier()}
    program = "import importlib.util, sys; print([each for each in sys.argv[1:] if importlib.util.find_spec(each)])"
    asked = sorted(known | present & {"pytest", "hypothesis", "mypy", "ruff", "sphinx", "pip"})
    assert len(asked) > len(known)
    assert gluon_only.output("python", "-c", program, *asked).strip() == str(sorted(known))


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=pytest.mark.exhaustive), "gluon"])
def test_the_demo_runs(gluon_only, backend):
    rows = json.loads(gluon_only.output("iris", "demo", "--json", "--ranks", 2, "--backend", backend))["rows"]
    assert [row["ok"] for row in rows] == [True, True]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_program_of_its_long_description_runs(gluon_only, folder):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / folder / "README.md").read_text(), re.DOTALL)
    assert gluon_only.output(program).strip()


KERNELS = """
import iris_core, torch, triton, triton.language as tl
from iris_core import Iris
from iris_gluon import IrisDeviceCtx, default_layout
from iris_triton import DeviceContext
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def with_gluon(IrisDeviceCtx: gl.constexpr, context_tensor, x, BLOCK: gl.constexpr):
    dev = IrisDeviceCtx.initialize(context_tensor)
    i = gl.arange(0, BLOCK, layout=default_layout([BLOCK]))
    dev.store(x + i, dev.cur_rank + 1, (dev.cur_rank + 1) % dev.num_ranks)

@triton.jit
def with_triton(context_tensor, x, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    dev = DeviceContext.from_tensor(context_tensor, WORLD)
    dev.store(x + tl.arange(0, BLOCK), dev.rank + 1, (dev.rank + 1) % WORLD)

def main():
    return [on_backend(name) for name in ("gluon", "triton")]

def on_backend(backend):
    with Iris("1MiB", backend=backend, device="cpu") as ctx:
        x, context = ctx.zeros(64, dtype=torch.int32), ctx.get_device_context()
        ctx.barrier()
        if backend == "gluon":
            with_gluon[(1,)](IrisDeviceCtx, context, x, BLOCK=64)
        else:
            with_triton[(1,)](context, x, WORLD=ctx.num_ranks, BLOCK=64)
        ctx.barrier()
        return set(x.tolist())

if __name__ == "__main__":
    for rank in iris_core.run(main, 2):
        print(rank)
"""


@pytest.mark.exhaustive
def test_kernels_run_on_ranks(gluon_only):
    """As those of the long descriptions and of the demo do."""
    assert gluon_only.output(KERNELS).splitlines() == ["[{2}, {2}]", "[{1}, {1}]"]
