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
    site = tmp_path / "site"
    build = [sys.executable, "-m", "sphinx", "-q", "-d", str(tmp_path / "trees"), "-D", "exclude_patterns=reference/*"]
    # without the reference, which takes minutes and then ends as incomplete; its docstrings have longer lines
    subprocess.run([*build, str(ROOT / "docs"), str(site)], capture_output=True, timeout=600, check=False)
    pages = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
    pages = [page for page in pages if page not in ("genindex.html", "search.html", "py-modindex.html")]
    assert len(pages) > 40
    (site / "look.html").write_text(LOOK.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(WIDTH)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=600000", "--dump-dom"]
    command = [CHROMIUM, *options, (site / "look.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = re.search(r"looked at(\[.*\])</pre>", done.stdout, re.DOTALL)
    assert found, done.stderr
    assert json.loads(html.unescape(found[1])) == []
