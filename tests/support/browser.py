"""Measures pages of a site in headless Chromium, each in a frame of its own size."""

import functools
import http.server
import json
import re
import shutil
import tempfile
import threading
from html import unescape

from .processes import environment, run

# For each (page, width, height): the right edge of the widest element that cannot scroll by itself,
# and the lower edges of the first code and of the first picture that is shown.
SCRIPT = """<pre id="told"></pre><script>
const told = [];
function edges(frame) {
  const page = frame.contentDocument, edge = (element, side) => element ? element.getBoundingClientRect()[side] : null;
  const free = [...page.querySelectorAll('article *')].filter(one => !one.closest('pre') && !one.closest('.table-wrapper'));
  const shown = [...page.querySelectorAll('article img')].find(one => one.getBoundingClientRect().height > 0);
  return { right: Math.max(0, ...free.map(one => edge(one, 'right'))), code: edge(page.querySelector('article pre'), 'bottom'),
           picture: edge(shown, 'bottom') };
}
function measure([path, width, height]) {
  return new Promise(done => {
    const frame = document.createElement('iframe');
    Object.assign(frame, { width, height, src: '/' + path });
    frame.onload = () => { told.push([path, width, edges(frame)]); frame.remove(); done(); };
    document.body.appendChild(frame);
  });
}
(async () => {
  for (const one of %s) await measure(one);
  document.getElementById('told').textContent = JSON.stringify(told);
})();
</script>"""


def chromium():
    """The path of a Chromium on this machine, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Pages(http.server.SimpleHTTPRequestHandler):
    """The files of a site, and a page that measures them."""

    def __init__(self, script, *arguments, **options):
        self.script = script
        super().__init__(*arguments, **options)

    def do_GET(self):
        if self.path != "/measure.html":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.script)

    def log_message(self, *_):
        pass


def measured(html, wanted):
    """{(page, width): edges} of (page, width, height) of the site in a folder."""
    # Chromium makes a socket in its temporary folder, so the folder's path must be short.
    with tempfile.TemporaryDirectory(prefix="dm-", dir="/tmp") as folder:
        return told_by(html, wanted, folder)


def told_by(html, wanted, folder):
    """Runs Chromium with `folder` as its home, and returns what the page measured."""
    script = (SCRIPT % json.dumps(wanted)).encode()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Pages, script, directory=str(html))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            command = [chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                       f"--user-data-dir={folder}/profile", "--virtual-time-budget=600000", "--dump-dom",
                       f"http://127.0.0.1:{server.server_port}/measure.html"]
            page = run(*command, env=environment(TMPDIR=folder, HOME=folder), timeout=300).stdout
        finally:
            server.shutdown()
            thread.join()
    told = re.search(r'<pre id="told">(.+?)</pre>', page, re.S)
    assert told, f"the page that measures has not finished: {page[-2000:]}"
    return {(path, width): edges for path, width, edges in json.loads(unescape(told[1]))}
