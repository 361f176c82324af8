# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The page for people, in a real browser without a screen, on a server that answers and changes its policy.

Where FLEXQUANT_SCREENSHOTS names a folder, pictures of the page are left there.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live_server import KEY, Live, complete

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.skipif(not (DRIVER and BROWSER), reason="`make test-full` fetches Chromium"),
]
PATIENCE = 60
"""Seconds that the page may take to show something; it asks every two seconds."""
MARKUP = "<img src=x onerror=alert(1)>.yaml"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    assert DRIVER and BROWSER
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    profile = tmp_path_factory.mktemp("profile")
    # Chromium's sandbox does not start as root, which containers often run as.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    libraries = Path(DRIVER).parents[1] / "lib"
    found = [*libraries.glob("*-linux-gnu"), *libraries.glob("*-linux-gnu/pulseaudio")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, found))}
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER, env=environment))
    yield driver
    driver.quit()


def wait(condition: Callable[[], Any]) -> Any:
    """Return what a condition returns as soon as that is true."""
    ends = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < ends, "the page does not show it"
        time.sleep(0.25)
    return found


def text(browser: Any, selector: str) -> str:
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join('\\n')", selector
    )


def ask(live: Live, number: int, tokens: int = 24) -> None:
    complete(live.client(), list(range(10, 30 + number)), tokens)


@pytest.fixture(scope="module")
def page(live: Live, browser: Any) -> Any:
    """Yield the page as somebody sees it who has given the key."""
    browser.set_window_size(1100, 900)
    browser.get(f"{live.url}/flexquant/ui")
    wait(lambda: "asks for its API key" in text(browser, "#state"))
    assert not browser.find_element("id", "main").is_displayed()
    browser.find_element("id", "key").send_keys(KEY)
    browser.find_element("css selector", "#login button").click()
    wait(lambda: browser.find_element("id", "main").is_displayed())
    assert not browser.find_element("id", "login").is_displayed()
    return browser


def picture(browser: Any, name: str) -> None:
    if folder := os.environ.get("FLEXQUANT_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder, f"{name}.png")))


def test_the_route_of_the_last_pass_is_lit(page: Any, live: Live) -> None:
    assert text(page, "#policy") == "phase"
    phases = text(page, ".phase").split()
    assert [word for word in phases if word in ("prefill", "mixed", "decode")] == [
        "prefill",
        "mixed",
        "decode",
    ]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: ask(live, number), range(3)))
    lit = wait(lambda: text(page, "[aria-current]"))
    assert lit.startswith("w4a16"), "a decode pass comes last"
    ask(live, 0, tokens=1)
    wait(lambda: text(page, "[aria-current]").startswith("w8a8"))


def test_what_passes_took_is_shown_by_plan_and_phase(page: Any, live: Live) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: ask(live, number), range(3)))
    wait(lambda: {"w8a8, prefill", "w4a16, decode"} <= totals(page).keys())
    for passes, tokens, seconds, milliseconds in totals(page).values():
        assert float(passes.replace(",", "")) >= 1 and float(tokens.replace(",", "")) >= 1
        assert float(seconds) >= 0 and float(milliseconds) > 0
    picture(page, "status-page")


def totals(page: Any) -> dict[str, list[str]]:
    """Return plan and phase -> passes, tokens, seconds and milliseconds a pass."""
    rows = [line.split("\t") for line in text(page, "#totals").splitlines()]
    return {name: numbers for name, *numbers in rows}


def test_another_policy_is_shown_by_its_name_as_text(page: Any, live: Live, tmp_path: Path) -> None:
    (tmp_path / MARKUP).write_text("{schema: flexquant.policy/v1, rules: [{use: w8a8}]}")
    live.apply(str(tmp_path / MARKUP))
    wait(lambda: text(page, "#policy") == str(tmp_path / MARKUP))
    assert page.execute_script("return document.images.length") == 0
    assert "w4a16" not in text(page, ".phase")
    live.apply("phase")
    wait(lambda: "w4a16" in text(page, ".phase"))


def test_nothing_comes_from_elsewhere_and_nothing_fails(page: Any, live: Live) -> None:
    wait(lambda: page.execute_script("return performance.getEntriesByType('resource').length"))
    names = page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert {name.removeprefix(live.url) for name in names} <= {"/flexquant", "/favicon.ico"}
    errors = [
        entry["message"]
        for entry in page.get_log("browser")
        if "favicon" not in entry["message"] and "401" not in entry["message"]
    ]
    assert errors == []
