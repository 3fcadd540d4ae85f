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


PRINTED = {
    "iris_core": str([[1.0] * 4] * 2), "iris_allocators": "host [0.0, 0.0, 0.0, 0.0]", "iris_triton": "[1.0, 0.0]",
    "iris_gluon": "[0.0, 1.0, 2.0, 3.0]",
}  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_program_of_its_long_description_runs(gluon_only, folder):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / folder / "README.md").read_text(), re.DOTALL)
    assert gluon_only.output(program) == f"{PRINTED[folder]}\n"
