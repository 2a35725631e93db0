"""The picture of docs/service.md, of what the demo recorded: ``python -m tests.viewer.picture``."""

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from tests.pages import DOCS
from tests.serve.serving import Serving
from tests.viewer.browsing import CHROMIUM, FLAGS

SIZE = {"width": 1120, "height": 720}


def main() -> None:
    """Record, look, and keep what is seen."""
    with tempfile.TemporaryDirectory() as folder:
        # The name is seen in the picture; the folder is nobody's.
        store = Path(folder) / "demo.duckdb"
        command = [sys.executable, "-m", "lightning_otel", "demo", "--store", str(store)]
        subprocess.run(command, check=True, capture_output=True)
        with Serving(store, "--port", "0") as server, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
            page = browser.new_page(viewport=SIZE)
            page.goto(f"{server.url}/?key={server.key}")
            page.wait_for_selector("[data-load]", state="detached")
            page.eval_on_selector("footer span", "(place) => { place.textContent = 'demo.duckdb' }")
            page.screenshot(path=DOCS / "viewer.png")
            browser.close()


if __name__ == "__main__":
    main()
