# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Pages for people, of a live server: the Grafana dashboard, and the status page in a real browser.

A real Prometheus, which scrapes the server, answers the queries of every panel. Where FLEXQUANT_SCREENSHOTS
names a folder, pictures of the status page are left there.
"""

import http
import json
import math
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_server import ProcessGroup, free_port
from tests import programs
from tests.integration.live_server import KEY, Live, complete

pytestmark = [pytest.mark.engine, pytest.mark.full]

PROMETHEUS = shutil.which("prometheus")
DASHBOARD = programs.ROOT / "examples" / "grafana" / "flexquant.json"
PATIENCE = 120
"""Seconds that data may take to arrive, and the page to show something; it asks every two seconds."""


@contextmanager
def prometheus(scraped: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a Prometheus that asks ``scraped``, a host and port, every second."""
    (folder / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: vllm
    static_configs: [{{targets: ["{scraped}"]}}]
""")
    address = f"127.0.0.1:{free_port()}"
    command = [str(PROMETHEUS), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    processes = ProcessGroup(command, folder / "prometheus.log", os.environ)
    try:
        yield f"http://{address}"
    finally:
        processes.stop()


def asked(prometheus_url: str, expression: str) -> list[dict[str, Any]]:
    """Return the series that a query finds now, without those that have no number."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{prometheus_url}/api/v1/query?{query}", timeout=30) as reply:
            series = json.load(reply)["data"]["result"]
    except urllib.error.HTTPError as e:
        if e.code != http.HTTPStatus.SERVICE_UNAVAILABLE:
            pytest.fail(f"{expression}: {e.read().decode()}")
        return []  # Prometheus has not started yet
    except urllib.error.URLError:
        return []  # its port is not open yet
    return [found for found in series if not math.isnan(float(found["value"][1]))]


def queries() -> dict[str, list[str]]:
    """Return the queries of each panel, with Grafana's variables filled in."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = {}
    for panel in dashboard["panels"]:
        asked = (target["expr"].replace("$model_name", ".*") for target in panel["targets"])
        found[panel["title"]] = [query.replace("$__rate_interval", "10s") for query in asked]
        assert not any("$" in query for query in found[panel["title"]])
    return found


@pytest.mark.skipif(PROMETHEUS is None, reason="`make test-full` fetches Prometheus")
def test_every_query_of_every_panel_returns_data(live: Live, tmp_path: Path) -> None:
    missing = [(panel, query) for panel, found in queries().items() for query in found]
    assert len(missing) > 10
    with (
        prometheus(urllib.parse.urlsplit(live.url).netloc, tmp_path) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        deadline = time.monotonic() + PATIENCE
        while missing and time.monotonic() < deadline:
            answered = pool.submit(complete, live.client(), list(range(10, 30)), 8)
            missing = [(panel, query) for panel, query in missing if not asked(server, query)]
            answered.result()
    assert not missing


DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
MARKUP = "<img src=x onerror=alert(1)>.yaml"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not (DRIVER and BROWSER):
        pytest.skip("`make test-full` fetches Chromium")
    from selenium import webdriver

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


def ask_three(live: Live) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: ask(live, number), range(3)))


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
    phases = ["prefill", "mixed", "decode"]
    assert [word for word in text(page, ".phase").split() if word in phases] == phases
    ask_three(live)
    lit = wait(lambda: text(page, "[aria-current]"))
    assert lit.startswith("w4a16"), "a decode pass comes last"
    ask(live, 0, tokens=1)
    wait(lambda: text(page, "[aria-current]").startswith("w8a8"))


def test_what_passes_took_is_shown_by_plan_and_phase(page: Any, live: Live) -> None:
    ask_three(live)
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
    said = [entry["message"] for entry in page.get_log("browser")]
    assert [error for error in said if "favicon" not in error and "401" not in error] == []
