"""The built site in a browser, headless: its tables and its search, in both languages, on a screen and on a phone."""

import json
import os
import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.python_process import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
MKDOCS = shutil.which("mkdocs", path=os.pathsep.join([str(ROOT / ".venv-docs" / "bin"), os.environ["PATH"]]))

pytestmark = pytest.mark.slow

# The width of the window, and how many columns a table may have that must be seen whole.
WIDTHS = [(1400, 99), (390, 4)]
# What is looked for, and the page that answers it.
ENGLISH = {
    "accumulation": "step.html",
    "checkpoint": "step.html",
    "DynamicLossScale": "api/loss_scales.html",
    "GradScaler": "migration.html",
    "install": "install.html",
    "learning rate": "step.html",
    "mindyolo": "toolkits.html",
    "saturation": "several_networks.html",
    "self-check": "devices.html",
}
CHINESE = {
    "GAN": "zh/gan_training.html",
    "安装": "zh/install.html",
    "快速入门": "zh/quick_start.html",
    "昇腾": "zh/devices.html",
    "检查点": "zh/step.html",
    "梯度累积": "zh/step.html",
    "梯度裁剪": "zh/step.html",
    "混合精度": "zh/migration.html",
    "自检": "zh/devices.html",
    "饱和模式": "zh/several_networks.html",
}
SEARCHES = {("/index.html", words): f"/{page}" for words, page in ENGLISH.items()}
SEARCHES.update({("/zh/index.html", words): f"/{page}" for words, page in CHINESE.items()})

PAGE = "<!doctype html><meta charset=utf-8><body><script src=/look.js></script><script>report({jobs})</script>"


class Site(SimpleHTTPRequestHandler):
    """Serves the site and the page that looks at it, and takes that page's report."""

    def __init__(self, *args, jobs, reports, **keywords):
        self.jobs, self.reports = jobs, reports
        super().__init__(*args, **keywords)

    def do_GET(self):
        own = {
            "/look": PAGE.replace("{jobs}", json.dumps(self.jobs)),
            "/look.js": (ROOT / "tests" / "support" / "site_in_browser.js").read_text(encoding="utf-8"),
        }
        if self.path not in own:
            super().do_GET()
            return
        content = own[self.path].encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/javascript" if self.path.endswith(".js") else "text/html")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self):
        self.reports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()
        self.server.reported.set()

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    """Waits for the browser's report."""

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.reported = threading.Event()

    def handle_error(self, *args):
        # The browser has closed a page that was still loading.
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, just built, and the folder for temporary files that the build had."""
    if not MKDOCS:
        pytest.skip("mkdocs is not there: `make docs` installs it")
    folder, temporary = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("temporary")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "TMPDIR": str(temporary)}
    build = [MKDOCS, "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, env=environment, check=True)
    return folder, temporary


def test_building_it_leaves_nothing_elsewhere(site):
    _, temporary = site
    assert list(temporary.iterdir()) == []


def test_what_needs_no_browser_to_be_seen(site):
    folder, _ = site
    # The theme asks for one beside each page that has a translation, or is one.
    for path in ("zh/sitemap.xml", "api/sitemap.xml"):
        assert (folder / path).read_text() == (folder / "sitemap.xml").read_text()
    chinese, english = ((folder / path).read_text() for path in ("zh/index.html", "index.html"))
    titles = dict.fromkeys(re.findall(r"[^\s>]* \((?:API|英文)\)", chinese))
    assert list(titles) == [
        *("API参考 (英文)", "训练Cell (API)", "损失缩放 (API)", "溢出检测 (API)", "跳过条件 (API)", "回调 (API)"),
        *("诊断 (API)", "更新日志 (英文)", "参与贡献 (英文)"),
    ]
    assert "(API)" not in english
    for page, hint in ((chinese, "搜索需要本地服务器"), (english, "To search, serve this folder:")):
        assert f"hidden>{hint} <code>python -m http.server</code></small><script>" in page
    # A formula that begins a line of the docstring stays in its sentence.
    cells = (folder / "api" / "training_cells.html").read_text()
    assert re.search(r"by itself, up to\s*<span><math[^>]*><mrow><msup>.{,80}</span> elements in all", cells)


@pytest.mark.skipif(not CHROMIUM, reason="there is no chromium, of the package 'chromium' of Debian say")
def test_it_is_legible_and_its_search_finds_the_page(site, tmp_path):
    folder, _ = site
    pages = sorted(f"/{page.relative_to(folder)}" for page in folder.rglob("*.html") if page.name != "404.html")
    reports = []
    jobs = {"pages": pages, "widths": WIDTHS, "searches": list(SEARCHES)}
    server = Server(partial(Site, jobs=jobs, reports=reports, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--window-size=1500,1000"]
    browser = subprocess.Popen(
        [CHROMIUM, *options, f"http://127.0.0.1:{server.server_port}/look"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert server.reported.wait(300), "the browser has not reported within 300 s"
    finally:
        browser.terminate()
        browser.wait()
        server.shutdown()
    (report,) = reports
    assert not report["faults"], "\n".join(report["faults"])
    assert len(pages) > 30
    assert dict(zip(SEARCHES, report["found"])) == SEARCHES
