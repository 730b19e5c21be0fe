"""The README as the wheel has it: no link of it is dead, once the project has an address."""

import configparser
import email
import importlib.util
import shutil
import subprocess
import sys

import pytest
from support.python_process import ROOT
from support.translations import read_page

ADDRESS = "https://example.org/ms_lossscale"


def test_each_link_leads_into_the_repository(tmp_path):
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    original = (ROOT / "README.md").read_text(encoding="utf-8")
    assert setup.readme("") == original
    path = tmp_path / "README.md"
    path.write_text(setup.readme(ADDRESS), encoding="utf-8")
    links = [link for block in read_page(path).blocks for link in block.links()]
    assert len(links) == sum(len(block.links()) for block in read_page(ROOT / "README.md").blocks) > 15
    for link in links:
        assert link.startswith("https://"), link
        if not link.startswith(ADDRESS):
            continue
        kind, branch, target = link[len(ADDRESS) + 1 :].split("/", 2)
        file, _, anchor = target.partition("#")
        assert (ROOT / file).is_file(), link
        assert (kind, branch) == ("raw" if file.endswith(".png") else "blob", "main"), link
        assert not anchor or anchor in read_page(ROOT / file).anchors, link


@pytest.mark.parametrize("address", ["", ADDRESS], ids=["without", "with"])
def test_the_wheel_has_it(tmp_path, address):
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "ms_lossscale", tmp_path / "ms_lossscale", ignore=shutil.ignore_patterns("__pycache__"))
    settings = configparser.RawConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    settings["metadata"]["project_urls"] = f"\nSource = {address}" if address else ""
    with (tmp_path / "setup.cfg").open("w", encoding="utf-8") as file:
        settings.write(file)
    program = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)
    path = tmp_path / built.stdout.split()[-1] / "METADATA"
    metadata = email.message_from_string(path.read_text(encoding="utf-8"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert (f"]({address}/blob/main/docs/step.md" in metadata.get_payload()) == bool(address)
    assert ("](docs/step.md" in metadata.get_payload()) != bool(address)
