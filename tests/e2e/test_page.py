"""The page at /ui, in headless Chromium: quotas live, a request as a waterfall, sessions; nothing from elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remora.deployments.quota_update import update_quotas
from remora.platform.base.config import parse_config

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def browser(require: Callable[[str], str]) -> Iterator[Any]:
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("needs selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = require("chromium")
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--window-size=1440,900",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(require("chromedriver")))
    yield made
    made.quit()


@pytest.fixture
def page(browser: Any, platform: Any) -> Iterator[Any]:
    """The page with its first figures; afterwards it has asked nobody else, and nothing went wrong in it."""
    platform.chat("Who are you?", max_tokens=4)
    browser.get(f"{platform.url}/ui")
    platform.eventually(lambda: texts(browser, ".namespace strong"), 10, what="namespaces on the page")
    yield browser
    hosts = browser.execute_script(
        "return performance.getEntriesByType('resource').map(each => new URL(each.name).origin)"
    )
    assert set(hosts) == {platform.url}
    assert browser.get_log("browser") == []
    browser.get("about:blank")


def texts(browser: Any, selector: str) -> list[str]:
    """Of all elements, read in one go: the page replaces them at any time."""
    script = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)"
    found: list[str] = browser.execute_script(script, selector)
    return found


def bar(browser: Any, namespace: str) -> str:
    script = """
        const row = document.querySelector(`.namespace[data-key="${arguments[0]}"]`);
        const label = row.querySelector(".bar").getAttribute("aria-label");
        return `${label}; room ${row.querySelector(".room").style.width}`;"""
    found: str = browser.execute_script(script, namespace)
    return found


def open_row(browser: Any, table: str, text: str) -> None:
    script = "[...document.querySelectorAll(arguments[0])].find(row => row.textContent.includes(arguments[1])).click()"
    browser.execute_script(script, f"#{table} tbody tr", text)


def test_a_changed_quota_is_seen_live(page: Any, platform: Any) -> None:
    assert texts(page, ".namespace strong") == ["smollm2", "smollm2/small", "smollm2/queue", "smollm2-int8"]
    assert "limit 8 MiB; room 3.125%" in bar(page, "smollm2/small")
    changed = platform.config.model_dump(exclude_unset=True)
    next(each for each in changed["namespaces"] if each["name"] == "smollm2/small")["limit"] = "64MiB"
    try:
        update_quotas(parse_config(changed))
        platform.eventually(
            lambda: "limit 64 MiB; room 25%" in bar(page, "smollm2/small"), 5, what="the new limit on the page"
        )
    finally:
        update_quotas(platform.config)
    platform.eventually(lambda: "limit 8 MiB" in bar(page, "smollm2/small"), 5, what="the old limit on the page")


def test_a_request_is_opened_as_a_waterfall(page: Any, platform: Any) -> None:
    platform.http.post("/v1/sessions", json={"model": "smollm2", "id": "page-trip"})
    body = {"model": "smollm2", "session_id": "page-trip", "max_tokens": 4}
    platform.http.post("/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": "Hello, page"}]})
    platform.eventually(lambda: "page-trip" in "".join(texts(page, "#sessions td")), 8, what="the session on the page")
    page.execute_script(
        "const field = document.querySelector('#trace-filter [name=session]'); field.value = 'page-trip';"
        "field.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    platform.eventually(lambda: len(texts(page, "#traces tbody tr")) == 1, 8, what="the one request of the session")
    open_row(page, "traces", "chat smollm2")
    wanted = {"chat smollm2", "router.route", "pool.admit", "engine.prefill", "engine.decode"}
    shown = platform.eventually(lambda: texts(page, "dialog[open] .span .what"), 5, what="the waterfall")
    assert {next(name for name in wanted if each.startswith(name)) for each in shown} == wanted
    widths = page.execute_script("return [...document.querySelectorAll('.lane i')].map(each => each.offsetWidth)")
    assert widths[0] == max(widths)
    assert min(widths) > 0
    page.execute_script("document.getElementById('detail').close()")
    open_row(page, "sessions", "page-trip")
    platform.eventually(lambda: "Hello, page" in "".join(texts(page, "dialog[open] .turn")), 5, what="the turn")
    (owner,) = [each["owner"] for each in platform.get("/v1/sessions")["data"] if each["id"] == "page-trip"]
    assert texts(page, "dialog[open] .moves li") == []
    assert owner in "".join(texts(page, "dialog[open] .facts-line"))
    page.execute_script("document.querySelector('dialog[open] .requests button').click()")
    platform.eventually(lambda: len(texts(page, "dialog[open] .span .what")) == len(shown), 5, what="its waterfall")
    page.execute_script("document.getElementById('detail').close()")
    (other,) = [each["id"] for each in platform.replicas("smollm2") if each["id"] != owner]
    platform.http.post("/v1/sessions/page-trip/migrate", json={"to": {"replica": other}}).raise_for_status()
    platform.http.post("/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": "And now?"}]})

    def moves() -> list[str]:
        """As they are now: what the page asks for has come when this returns."""
        page.execute_script("document.getElementById('detail').close()")
        open_row(page, "sessions", "page-trip")
        platform.eventually(lambda: texts(page, "dialog[open] .facts-line"), 5, what="the session's details")
        return texts(page, "dialog[open] .moves li")

    (move,) = platform.eventually(moves, 8, what="the session's move")
    assert move.endswith(f"{owner} → {other}")
    page.execute_script("document.getElementById('detail').close()")
    branches = {"branches": [{"session_id": "page-fork"}, {"keep": False}], "max_tokens": 2}
    fork = {**branches, "messages": [{"role": "user", "content": "And then?"}]}
    platform.http.post("/v1/sessions/page-trip/fork", json=fork).raise_for_status()
    platform.eventually(lambda: len(moves()) == 2, 8, what="its fork")
    assert "forked: page-fork at " in texts(page, "dialog[open] .moves li")[0]
    platform.http.delete("/v1/sessions/page-fork")
    page.execute_script("document.getElementById('detail').close()")
    platform.http.delete("/v1/sessions/page-trip")


def test_it_is_light_or_dark_as_the_reader_likes(page: Any) -> None:
    def background(scheme: str) -> int:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        colour: str = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))

    assert background("light") > 600
    assert background("dark") < 150
