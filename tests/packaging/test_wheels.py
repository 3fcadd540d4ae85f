"""What a user installs from wheels: ours, and a third party's, which is found, chosen and used; no repository."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from .workspace import FOLDERS, ROOT

pytestmark = pytest.mark.slow

PACKAGE = "iris_example_backend"
EXAMPLE = ROOT / "examples" / "plugins" / PACKAGE
_LEFTOVERS = shutil.ignore_patterns("*.egg-info", "build", "dist", "__pycache__", ".pytest_cache")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
_BUILD = "import os, sys, setuptools.build_meta as b; os.chdir(sys.argv[2]); b.build_wheel(sys.argv[1])"
"""What pip lets each pyproject.toml's backend do, and asks in processes of their own before."""
_TIMEOUT_S, URL = 300, "https://example.org/iris"


def build_wheels(folder):
    """Build wheels of the four distributions and of the example from copies; returns the folder that has them."""
    for module in ("pip", "setuptools"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no wheel can be built without {module}")
    for source in (*(ROOT / name for name in FOLDERS), EXAMPLE):
        shutil.copytree(source, folder / "sources" / source.name, ignore=_LEFTOVERS)  # building writes next to them
    subprocess.run(["make", "-f", ROOT / "Makefile", "urls", f"URL={URL}"], check=True, cwd=folder / "sources")
    for copy in (folder / "sources").iterdir():
        command = [sys.executable, "-c", _BUILD, folder / "wheels", copy]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "wheels"


class Environment:
    """A virtual environment with our wheels, in front of the distributions of other people that are installed here."""

    def __init__(self, folder, wheels):
        self.folder = folder
        venv.create(folder / "venv", symlinks=True)
        self.scripts = folder / "venv" / "bin"
        self.site_packages = pathlib.Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")}))
        (self.site_packages / "third_party.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # this environment alone
        names = (wheel.name.partition("-")[0] for wheel in wheels.glob("*.whl"))
        options = ("--no-compile", "--no-index", "--find-links", wheels, "--no-deps", "--force-reinstall")
        for command in (("install", *options, *names), ("check",)):
            run = [*_PIP, "--python", self.scripts / "python", *command]
            done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, env=environ)
            assert done.returncode == 0 or command == ("check",), done.stdout + done.stderr
        self.problems = done.stdout.splitlines()

    def output(self, program, *arguments):
        """What "python", "iris" or a program of this source prints, outside the checkout, without our settings."""
        if "\n" in program:
            (self.folder / "program.py").write_text(program)
            program, arguments = "python", ("program.py", *arguments)
        ours = ("IRIS_", "PYTHON", "PYTEST_", "COV_", "COVERAGE_", "VIRTUAL_ENV")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        options = {"capture_output": True, "text": True, "cwd": self.folder, "env": environ, "timeout": _TIMEOUT_S}
        done = subprocess.run([self.scripts / program, *map(str, arguments)], check=False, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    return build_wheels(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="session")
def installed(tmp_path_factory, wheels):
    return Environment(tmp_path_factory.mktemp("installed"), wheels)


def test_the_wheels_have_every_file_and_nothing_else(wheels):
    for folder in FOLDERS:
        (wheel,) = wheels.glob(f"{folder}-*.whl")
        archive = zipfile.ZipFile(wheel)
        about = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        assert "licenses/LICENSE" in about
        assert f"Project-URL: Issues, {URL}/issues\n" in archive.read(about["METADATA"]).decode()
        packed = {*archive.namelist()} - {*about.values()}
        source = wheels.parent / "sources" / folder / "src"  # the copies: somebody may be at work on the originals
        assert packed == {str(path.relative_to(source)) for path in (source / folder).rglob("*") if path.is_file()}
        assert f"{folder}/py.typed" in packed


def test_every_package_comes_from_a_wheel_and_finds_what_it_requires(installed):
    program = "import importlib as i, sys; print(sys.path); [print(i.import_module(n).__file__) for n in sys.argv[1:]]"
    path, *files = installed.output("python", "-c", program, *FOLDERS, PACKAGE).splitlines()
    assert len(files) == len(FOLDERS) + 1
    assert all(file.startswith(f"{installed.site_packages}/") for file in files)
    assert not any(f"{ROOT / folder}/" in each for each in (path, *files) for folder in FOLDERS)
    assert [line for line in installed.problems if line.startswith("iris-")] == []


def test_the_programs_of_the_long_descriptions_run(installed):
    """The core's starts ranks; the example is chosen by name and by nothing else."""

    def program(folder):
        return re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]

    assert installed.output(program(ROOT / "iris_core")) == f"{[[1.0] * 4] * 2}\n"
    chosen = "    print(ctx.plugin_names)\n"
    automatic = f"from iris_core import Iris\nwith Iris('1MiB', device='cpu') as ctx:\n{chosen}"
    needless = "import sys\nprint('pytest' in sys.modules)\n"  # the environment has it, many a user's has not
    lines = installed.output(program(EXAMPLE) + chosen + automatic + needless).splitlines()
    example, usual = {"allocator": "example", "backend": "example"}, {"allocator": "host", "backend": "triton"}
    assert lines == ["rank 0 got 1.0", str(example), str(usual), "False"]
    demo = json.loads(installed.output("iris", "demo", "--ranks", "2", "--only", "message-passing", "--json"))
    assert [(row["name"], row["ok"], row["ranks"]) for row in demo["rows"]] == [("message-passing", True, 2)]
    plugins, ours = installed.output("iris", "plugins"), ("example", "host", "torch", "vmem", "nccl", "triton", "gluon")
    assert [name for name in ours if name not in plugins] == []


def test_the_example_passes_the_kit_and_its_own_tests(installed):
    tests = installed.folder / "tests"
    shutil.copytree(EXAMPLE / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("-rs", "-p", "no:cacheprovider", "--strict-config")
    done = installed.output("python", "-m", "pytest", *options, tests)
    passed = int(re.search(r"(\d+) passed", done).group(1))
    assert passed > 110
    known = r"does not (implement iris_plugin_diagnose|provide (decommit|growth|import-tensor)|work on (cuda|hip))$"
    known += "|has no (compare_clocks|checker|set_trace)$|has none of|and not on a group of ranks$|compiles nothing"
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", done, re.MULTILINE)
    assert [each for each in reasons if not re.search(known, each)] == []
