"""Pages of large steps: bytes of the file, seconds to write it, and milliseconds until a browser has drawn it.

    python benchmarks/explorer.py [--only llama-7b,bert-large] [--json FILE]

Each page has the frontier behind its slider. It is drawn in Chromium without a window, three times.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES
from machine import header
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

import remat

RESULTS = Path(__file__).parent / "results" / "explorer.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="llama-7b,bert-large,resnet-50")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    pages = {}
    for name in options.only.split(","):
        pages[name] = page(name)
        print(json.dumps({name: pages[name]}), flush=True)
    options.json.write_text(json.dumps({**header("explorer"), "pages": pages}, indent=1) + "\n")


def page(name: str) -> dict[str, Any]:
    joint = remat.capture(*ARCHITECTURES[name](), lower="eager")
    plan, frontier = remat.plan(joint, 0.5), remat.frontier(joint)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        started = time.perf_counter()
        plan.explore(path, frontier=frontier)
        written_s = time.perf_counter() - started
        drawn = drawn_ms(path)
        return {
            "nodes": len(joint.graph.nodes),
            "points": len(frontier.points),
            "bytes": path.stat().st_size,
            "written_s": round(written_s, 1),
            "drawn_ms": [round(ms) for ms in drawn],
            "median_drawn_ms": round(statistics.median(drawn)),
        }


def drawn_ms(path: Path, times: int = 3) -> list[float]:
    """Milliseconds from the start of loading to the first frame with everything in it."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        found = []
        for _ in range(times):
            driver.get("about:blank")
            driver.get(path.as_uri())
            wait = WebDriverWait(driver, 60)
            found.append(
                float(wait.until(lambda d: d.execute_script("return window.rematDrawnMs")))
            )
        return found
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
