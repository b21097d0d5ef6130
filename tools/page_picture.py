"""Takes docs/page.png, the picture of the server's page in the README: serves the embedded pair with K = 4, has the
page generate a text twice, so that nothing is measured while caches are cold, and shows a step of which some drafts
were accepted and one was replaced. Needs playwright and Debian's chromium.

    python tools/page_picture.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

# The first step of which some drafts were accepted, one was replaced, and others were not used.
SHOW = """() => show(drafted.steps.findIndex(({ drafts, tokens }) =>
  tokens.length > 1 && tokens.at(-1)[2] === "recovered" && drafts.length > tokens.length))"""


@contextmanager
def served() -> Iterator[str]:
    """The URL of a server of the embedded pair."""
    command = [sys.executable, "-m", "specdec", "serve", "--port", "0", "--num-drafts", "4", "--log-format", "json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if line.startswith("{") and "url" in (told := json.loads(line)):
                yield told["url"]
                break
        else:
            raise RuntimeError(f"{' '.join(command)} ended without an address")
    finally:
        server.terminate()
        server.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    docs = Path(__file__).resolve().parents[1] / "docs"
    parser.add_argument("--out", type=Path, default=docs / "page.png")
    parser.add_argument("--prompt", default="def read(self, size=-1):")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()

    with served() as url, sync_playwright() as run:
        browser = run.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        scheme = "dark" if args.dark else "light"
        page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme=scheme)
        page.goto(url)
        expect(page.get_by_role("status")).to_have_text("Ready.", timeout=120_000)
        page.fill("#prompt", args.prompt)
        page.fill("#max_tokens", str(args.max_tokens))
        for _ in range(2):
            page.click("#go")
            expect(page.get_by_role("status")).to_contain_text("Done", timeout=600_000)
        page.evaluate(SHOW)
        page.screenshot(path=args.out, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
