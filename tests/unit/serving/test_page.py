"""The files of the page: complete, served as what they are, and closed to other hosts."""

from __future__ import annotations

import re

import httpx

from remora.platform.http.page import page_files


def test_every_file_that_is_named_exists_and_every_file_is_named() -> None:
    files = page_files()
    named = {"index.html"}
    for content in files.values():
        named |= set(re.findall(r'(?:from|href=|src=) ?"(?:\./)?([\w.]+)"', content.decode()))
    assert named == set(files)


def test_nothing_comes_from_another_host() -> None:
    for name, content in page_files().items():
        urls = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", content.decode())
        assert [url for url in urls if "www.w3.org" not in url] == [], name


async def test_the_page_is_served_with_its_types_and_rules(http: httpx.AsyncClient) -> None:
    moved = await http.get("/ui")
    assert (moved.status_code, moved.headers["location"]) == (308, "/ui/")
    page = await http.get("/ui/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in page_files():
        answer = await http.get(f"/ui/{name}")
        assert (answer.status_code, answer.content) == (200, page_files()[name])
    assert (await http.get("/ui/main.js")).headers["content-type"].startswith("text/javascript")
    for path in ("nothing.js", "..%2fhttp%2fpage.py", "%2e%2e/app.py"):
        assert (await http.get(f"/ui/{path}")).status_code == 404
