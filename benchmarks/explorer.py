"""Pages of large steps: bytes of the file, seconds to write it, and milliseconds until a browser has drawn it.

Each page has the frontier behind its slider. It is drawn in Chromium without a window, three times.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import remat
from benchmarks.experiment import Case, Experiment, Row, grid, timed
from benchmarks.workloads import captured


def measure(name: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    joint = captured(name, "eager")
    plan, frontier = remat.plan(joint, 0.5), remat.frontier(joint)
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            written_s = timed(lambda path=path: plan.explore(path, frontier=frontier))[0]
            drawn = drawn_ms(path)
            yield case.row(
                nodes=len(joint.graph.nodes),
                points=len(frontier.points),
                bytes=path.stat().st_size,
                written_s=round(written_s, 1),
                drawn_ms=[round(ms) for ms in drawn],
                median_drawn_ms=round(statistics.median(drawn)),
            )


def drawn_ms(path: Path, times: int = 3) -> list[float]:
    """Milliseconds from the start of loading to the first frame with everything in it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    browser, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver_path is None:
        raise RuntimeError("chromium and chromedriver draw pages, and are not both installed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    found = []
    with webdriver.Chrome(options=options, service=Service(driver_path)) as driver:
        for _ in range(times):
            driver.get("about:blank")
            driver.get(path.as_uri())
            wait = WebDriverWait(driver, 60)
            drawn = wait.until(lambda d: d.execute_script("return window.rematDrawnMs"))
            found.append(float(drawn))
    return found


EXPERIMENTS = {
    "explorer": Experiment(
        about="pages of large steps: size, seconds to write, milliseconds to draw in Chromium",
        cases=grid(("llama-7b", "bert-large", "resnet-50"), sides=("page",)),
        quick=grid(("llama-small",), sides=("page",)),
        measure=measure,
        tables=("pages",),
    ),
}
