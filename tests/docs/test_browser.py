"""Built pages in headless Chromium: nothing is wider than its page, and every picture is shown."""

import html
import importlib.util
import json
import re
import shutil
import subprocess
import sys

import pytest

from .excerpts import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH = 1280

LOOK = """<pre></pre><script>
(async () => {
  const found = [];
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    Object.assign(frame, {width: WIDTH, height: 900, src: page});
    await new Promise(loaded => { frame.onload = loaded; document.body.append(frame); });
    const seen = frame.contentDocument, wide = each => each.scrollWidth > each.clientWidth + 1;
    if (seen.documentElement.scrollWidth > WIDTH) found.push([page, "the page is too wide"]);
    for (const each of seen.querySelectorAll(".table-wrapper, article pre"))
      if (wide(each)) found.push([page, "cut off: " + each.textContent.trim().slice(0, 60)]);
    for (const each of seen.querySelectorAll("article img"))
      if (!each.naturalWidth) found.push([page, "not shown: " + each.src]);
    if (!seen.querySelector("article h1")) found.push([page, "no title"]);
    frame.remove();
  }
  document.querySelector("pre").textContent = "looked at" + JSON.stringify(found);
})();
</script>"""


@pytest.mark.skipif(not importlib.util.find_spec("sphinx"), reason="Sphinx is not installed: make docs")
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_pages_fit(tmp_path):
    """Those of `make docs` if nothing has changed since; without the reference, whose docstrings have longer lines."""
    site, sources = ROOT / "build" / "docs", (ROOT / "docs").rglob("*.*")
    index = site / "index.html"
    changed = max(path.stat().st_mtime for path in sources if path.suffix != ".pyc")
    if not index.exists() or index.stat().st_mtime < changed:
        site = tmp_path / "site"
        build = ["-q", "-d", f"{tmp_path}/trees", "-D", "exclude_patterns=reference/*", f"{ROOT}/docs", str(site)]
        # it ends as incomplete, for the reference is not there
        subprocess.run([sys.executable, "-m", "sphinx", *build], capture_output=True, timeout=600, check=False)
    no_pages = {"genindex.html", "search.html", "py-modindex.html"}
    paths = [path for path in sorted(site.rglob("*.html")) if path.name not in no_pages]
    pages = [path.as_uri() for path in paths if not {"_static", "reference", "_modules"} & {*path.parts}]
    assert len(pages) > 40
    look = tmp_path / "look.html"
    look.write_text(LOOK.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(WIDTH)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=600000", "--dump-dom"]
    command = [CHROMIUM, *options, look.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = re.search(r"looked at(\[.*\])</pre>", done.stdout, re.DOTALL)
    assert found, done.stderr
    assert json.loads(html.unescape(found[1])) == []
