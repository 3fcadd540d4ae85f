"""Pictures are what the script draws, stand alone, and can be read in light and in dark."""

import re
import xml.etree.ElementTree as ET

from tables import table

from .excerpts import ROOT, script

FOLDER = ROOT / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"

draw = script("pictures/draw.py")


def test_the_files_are_what_is_drawn():
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(draw.PICTURES)
    for name, picture in draw.PICTURES.items():
        assert (FOLDER / f"{name}.svg").read_text() == picture().svg(), "python docs/pictures/draw.py writes them"


@table("name", sorted(draw.PICTURES))
def test_a_picture_stands_alone_and_fits(name):
    root = ET.fromstring((FOLDER / f"{name}.svg").read_text())
    assert root.find(f"{SVG}title").text
    assert len(root.find(f"{SVG}desc").text) > 60, "for who cannot see it"
    assert not [each for each in root.iter() if "href" in str(each.attrib) or each.tag == f"{SVG}script"]
    width, height = int(root.get("width")), int(root.get("height"))
    for each in root.iter(f"{SVG}rect"):
        assert float(each.get("x")) + float(each.get("width")) <= width
        assert float(each.get("y")) + float(each.get("height")) <= height
    for each in root.iter(f"{SVG}text"):
        style, x = each.get("class").split(), float(each.get("x"))
        long = len(each.text) * (7.6 if "code" in style else 6.6 if "small" in style else 7.6)
        begin = x - long / 2 if "middle" in style else x - long if "end" in style else x
        assert begin >= 0, each.text
        assert begin + long <= width, each.text
        assert 12 <= float(each.get("y")) <= height - 5, each.text


def luminance(colour):
    """Relative luminance, WCAG 2.1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@table("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_colour(scheme):
    light, _, dark = draw.STYLE.partition("@media (prefers-color-scheme: dark)")
    fills = {}
    for part in (light, dark) if scheme == "dark" else (light,):
        fills |= dict(re.findall(r"(\S+) \{[^}]*?fill: (#\w{6})", part))
    for ground in (".panel", ".box", ".blue", ".green", ".amber", ".violet"):
        assert contrast(fills["text"], fills[ground]) >= 7, ground
    for ground in (".panel", ".box"):
        assert contrast(fills[".muted"], fills[ground]) >= 4.5, ground


def test_every_picture_is_shown_with_words():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    shown = re.findall(r"!\[([^\]]*)\]\((?:docs/)?pictures/(\w+)\.svg\)", pages)
    assert {name for _, name in shown} == set(draw.PICTURES)
    assert all(len(words) > 20 for words, _ in shown)
