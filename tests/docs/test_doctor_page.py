"""docs/doctor.md knows every line and every key of the report."""

import inspect
import re

from iris_core.cli import doctor
from iris_core.diagnosis import PairCheck

from .excerpts import ROOT

PAGE = (ROOT / "docs" / "doctor.md").read_text()
PLUGINS = [f"{name}/src/{name}/_plugin.py" for name in ("iris_allocators", "iris_triton")]
SOURCES = ["iris_core/src/iris_core/cli/doctor.py", *PLUGINS]


def test_every_line_is_on_the_page():
    source = "".join((ROOT / path).read_text() for path in SOURCES)
    subjects = set(re.findall(r'(?:Finding|diagnose)\(\s*"([^"{}]+)"', source))
    assert len(subjects) > 14
    rows = PAGE.partition("## The lines")[2].partition("## ")[0].splitlines()
    listed = {name.strip() for row in rows if row.startswith("|") for name in row.split("|")[1].split(",")}
    assert subjects <= listed | {"plugins", "self-test"}  # the two, in the place of lines that could not be made


def test_the_keys_of_a_report_are_on_the_page(monkeypatch):
    monkeypatch.setattr(doctor, "apart", lambda *args: ([], "failed"))
    document = doctor.examine(self_test=False)
    test = doctor.SelfTest("a", "b", "cpu", 1, checks=[PairCheck("write", 0, 0)]).to_json()
    keys = {*document, *document["findings"][0], *test, *test["checks"][0]}
    keys |= set(re.findall(r'"([a-z_]+)"[]:]', inspect.getsource(doctor.survey_gpus)))
    assert keys >= {"arch", "access", "cuda_of_torch", "gpus"}
    assert [key for key in sorted(keys) if f"`{key}`" not in PAGE] == []
