"""A page in a real browser: what moves, what is sorted, what is linked, and with the keyboard alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import remat
from tests.report.blocks import stacked

if TYPE_CHECKING:
    from selenium.webdriver.remote.webelement import WebElement

pytest.importorskip("bokeh")
pytest.importorskip("selenium")
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="Chromium is not installed: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def joint() -> remat.JointGraph:
    return stacked(batch=64)


@pytest.fixture(scope="module")
def plan(joint: remat.JointGraph) -> remat.Plan:
    return remat.plan(joint, 0.5)


@pytest.fixture(scope="module")
def page(
    joint: remat.JointGraph, plan: remat.Plan, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    remat.frontier(joint).explore(path, plan)
    return path


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def browser(started: Any, page: Path) -> Iterator[Any]:
    """The page, drawn; afterwards nothing stands in the console that is worse than information."""
    show(started, page, 1280, "light")
    yield started
    assert [e["message"] for e in started.get_log("browser") if e["level"] != "INFO"] == []


def show(driver: Any, page: Path, width: int, scheme: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    driver.get(page.as_uri())
    WebDriverWait(driver, 60).until(lambda d: d.execute_script("return window.rematDrawnMs"))


def texts(elements: list[WebElement]) -> list[str]:
    return [e.text for e in elements]


#: What is selected in the picture.
SELECTED = "Bokeh.documents.map(d => d.get_model_by_name('values')).find(m => m).data_source.selected.indices"
TIMELINE = "return Bokeh.documents.map(d => d.get_model_by_name('timeline-figure')).find(m => m)"


def data_of(browser: Any) -> Any:
    """What the page draws."""
    return browser.execute_script("return JSON.parse(document.getElementById('data').textContent)")


def figures(browser: Any) -> list[str]:
    return texts(browser.find_elements("css selector", "#cards .big"))


def column(browser: Any, k: int) -> list[str]:
    return texts(browser.find_elements("css selector", f"#kept tbody td:nth-child({k})"))


def selected(browser: Any) -> list[str]:
    return texts(
        browser.find_elements("css selector", '#kept tr[aria-selected="true"] td:first-child')
    )


def test_the_parts_of_the_page_are_there(browser: Any, plan: remat.Plan) -> None:
    for part in ("cards", "budget", "timeline", "frontier", "legend", "kept", "again"):
        assert browser.find_element("id", part).is_displayed(), part
    assert len(column(browser, 1)) == len(plan.view.kept)
    canvases = browser.execute_script(
        "const found = []; const walk = (root) => { for (const e of root.querySelectorAll('*')) {"
        "if (e.tagName === 'CANVAS') found.push(e.width); if (e.shadowRoot) walk(e.shadowRoot); } };"
        "walk(document); return found;"
    )
    assert canvases
    assert min(canvases) > 200
    legend = browser.find_element("id", "legend").rect
    assert legend["y"] + legend["height"] <= 900, "memory is above the fold"


def test_the_slider_moves_by_the_keyboard(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    slider = browser.find_element("id", "budget")
    assert slider.accessible_name == "Plans along the frontier by saved"
    at_first, kept = figures(browser), column(browser, 1)
    slider.send_keys(Keys.HOME)
    least = figures(browser)
    assert least != at_first
    assert column(browser, 1) != kept
    assert slider.get_attribute("aria-valuetext") == browser.find_element("id", "budget-now").text
    for _ in range(int(slider.get_attribute("max"))):
        slider.send_keys(Keys.ARROW_RIGHT)
    most = figures(browser)
    assert most not in (least, at_first)
    browser.find_element("css selector", ".jumps button").click()
    assert figures(browser) == at_first


def test_a_table_is_sorted_by_its_heads(browser: Any) -> None:
    head = browser.find_elements("css selector", "#kept th")
    assert head[1].get_attribute("aria-sort") == "descending"
    names = column(browser, 1)
    head[0].find_element("tag name", "button").send_keys(" ")
    assert column(browser, 1) == sorted(names)
    head[0].find_element("tag name", "button").send_keys(" ")
    assert column(browser, 1) == sorted(names, reverse=True)
    assert [h.get_attribute("aria-sort") for h in head][:2] == ["descending", "none"]


def test_a_row_and_the_picture_select_each_other(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    names = column(browser, 1)
    browser.find_element("css selector", '#kept tr[tabindex="0"]').send_keys(Keys.ARROW_DOWN)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert selected(browser) == [names[1]]
    (index,) = browser.execute_script(f"return {SELECTED}")
    assert names[1] in browser.find_element("id", "picked").text
    browser.execute_script(SELECTED + " = []")
    assert selected(browser) == []
    browser.execute_script(SELECTED + f" = [{index}]")
    assert selected(browser) == [names[1]]
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert browser.execute_script(f"return {SELECTED}") == []


def test_a_click_selects_the_run_that_is_clicked(browser: Any) -> None:
    """What is computed twice stands twice in the picture, by one name."""
    data = data_of(browser)
    stop = data["stops"][int(browser.find_element("id", "budget").get_attribute("value"))]
    names = stop["values"]["name"]
    again = [k for k, name in enumerate(names) if name in names[:k]]
    assert again
    for k in again[:4]:
        for chosen in ([k], []):
            browser.execute_script(SELECTED + f" = {chosen}")
            assert browser.execute_script(f"return {SELECTED}") == chosen


def test_arrow_keys_go_from_block_to_block(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    data = data_of(browser)
    values = data["stops"][data["start"]]["values"]
    timeline, picked = (browser.find_element("id", name) for name in ("timeline", "picked"))
    for k in (0, 1):
        timeline.send_keys(Keys.ARROW_RIGHT)
        for part in ("name", "shape", "source", "said"):
            assert data["texts"][values[part][k]] in picked.text
    timeline.send_keys(Keys.ARROW_LEFT)
    assert data["texts"][values["name"][0]] in picked.text
    timeline.send_keys(Keys.ESCAPE)
    assert picked.text == ""


def test_the_axis_is_time_or_operators(browser: Any) -> None:
    end = f"{TIMELINE}.x_range.end"
    data = data_of(browser)
    stop = data["stops"][data["start"]]
    assert browser.execute_script(end) == stop["times"][-1]
    browser.find_element("id", "by-operators").send_keys(" ")
    assert browser.execute_script(end) >= stop["moments"]
    assert browser.find_element("id", "axis").text == "operators run"


def test_everything_that_is_used_is_reached_by_tab(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    reached = set()
    for _ in range(40):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        found = browser.switch_to.active_element
        if found.tag_name != "body":
            assert found.value_of_css_property("outline").endswith("solid 2px"), found.tag_name
        table = browser.execute_script("return arguments[0].closest('table')?.id", found)
        reached.add(found.get_attribute("id") or (found.tag_name, table))
    assert {
        "budget",
        ("summary", None),
        ("button", "kept"),
        ("tr", "kept"),
        ("button", "again"),
    } <= reached


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_window_and_follows_light_and_dark(
    browser: Any, page: Path, width: int, scheme: str
) -> None:
    show(browser, page, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    label = browser.execute_script(f"{TIMELINE}.left[0].major_label_text_color")
    light = scheme == "light"
    assert background == ("rgb(255, 255, 255)" if light else "rgb(20, 23, 27)")
    assert label == ("#5a626d" if light else "#a3abb6")
