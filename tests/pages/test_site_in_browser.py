"""The built site in a browser, headless: its tables and its search, in both languages, on a screen and on a phone."""

import functools
import json
import os
import queue
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.python_process import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
MKDOCS = shutil.which("mkdocs", path=os.pathsep.join([str(ROOT / ".venv-docs" / "bin"), os.environ["PATH"]]))

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHROMIUM, reason="there is no chromium, of the package 'chromium' of Debian say"),
    pytest.mark.skipif(not MKDOCS, reason="mkdocs is not there: `make docs` installs it"),
]

# The width of the window, and how many columns a table may have that must be seen whole.
WIDTHS = [(1400, 99), (500, 2), (390, 3)]
# What is looked for, and the page that answers it.
SEARCHES = {
    "index.html": {
        "accumulation": "step.html",
        "checkpoint": "step.html",
        "DynamicLossScale": "api/DynamicLossScale.html",
        "GradScaler": "migration.html",
        "install": "quick_start.html",
        "learning rate": "step.html",
        "mindyolo": "migration.html",
        "saturation": "performance.html",
        "self-check": "performance.html",
    },
    "zh/index.html": {
        "安装": "zh/quick_start.html",
        "快速入门": "zh/quick_start.html",
        "检查点": "zh/step.html",
        "梯度累积": "zh/step.html",
        "梯度裁剪": "zh/step.html",
        "饱和模式": "zh/performance.html",
    },
}
LOOK = "<!doctype html><meta charset=utf-8><body><script>{}report({})</script>"


class Site(SimpleHTTPRequestHandler):  # Serves the site, and takes the report of the page that looks at it.
    def do_POST(self):
        self.server.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_it_is_legible_and_its_search_finds_the_page(tmp_path):
    site = tmp_path / "site"
    for config, folder in (("mkdocs.yml", site), ("mkdocs.zh.yml", site / "zh")):
        build = [MKDOCS, "build", "--quiet", "--config-file", config, "--site-dir", folder]
        subprocess.run(build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html") if page.name != "404.html")
    assert len(pages) > 30
    searches = [(start, words) for start, its in SEARCHES.items() for words in its]
    script = (ROOT / "tests" / "support" / "site_in_browser.js").read_text()
    jobs = json.dumps({"pages": pages, "widths": WIDTHS, "searches": searches})
    (site / "look.html").write_text(LOOK.format(script, jobs))
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Site, directory=str(site)))
    server.reports = queue.Queue()
    # The browser closes pages that are still loading.
    server.handle_error = lambda *args: None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--window-size=1500,1000"]
    command = [CHROMIUM, *options, f"http://127.0.0.1:{server.server_port}/look.html"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            report = server.reports.get(timeout=300)
        finally:
            browser.terminate()
            server.shutdown()
    assert not report["faults"], "\n".join(report["faults"])
    expected = [page for its in SEARCHES.values() for page in its.values()]
    assert dict(zip(map(tuple, searches), report["found"])) == dict(zip(map(tuple, searches), expected))
