"""The pictures of README and docs, and what makes them so small."""

import re
import sys

import numpy as np
import pytest
from PIL import Image
from support.python_process import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = re.compile(r"!\[(.*?)\]\((.*?)\)")


def test_the_pages_show_all_pictures_and_say_what_is_to_be_seen():
    shown = [((page.parent / path).resolve(), text) for page in PAGES for text, path in SHOWN.findall(page.read_text())]
    assert {path for path, _ in shown} == set((ROOT / "docs" / "pictures").glob("*.png"))
    assert all(len(text) > 80 for _, text in shown)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "pictures").glob("*.png")), ids=lambda path: path.stem)
def test_a_picture_is_small_and_legible_on_a_dark_page(path):
    assert path.stat().st_size < 120 * 1024
    picture = Image.open(path)
    assert picture.info.get("transparency") is None
    assert np.array(picture.convert("L"))[0].min() > 200


def test_publish(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import pictures

    monkeypatch.setattr(pictures, "PICTURES", tmp_path)
    transparent = np.zeros((100, 400, 4), np.uint8)
    transparent[40:60, :200] = (200, 0, 0, 255)
    Image.fromarray(transparent).save(tmp_path / "made.png")
    pictures.publish(tmp_path / "made.png", "small", 200)
    small = Image.open(tmp_path / "small.png").convert("RGB")
    assert small.size == (200, 50)
    assert small.getpixel((10, 5)) == (255, 255, 255)
    assert small.getpixel((50, 25)) == (200, 0, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"made.png", "small.png"}
    del sys.modules["pictures"]
