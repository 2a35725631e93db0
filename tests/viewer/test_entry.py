"""Who comes in to the pages: links, cookies, forms, and what other sites may not do."""

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import pytest
from tests.listening import Handler, listen
from tests.viewer.browsing import KEY, prefix
from tests.viewer.client import Ask, Asking

from lightning_otel import Span, Store

FORM = "application/x-www-form-urlencoded"


class _Session(NamedTuple):
    """What a browser has that opened the link: the path below which its pages are, the cookie."""

    asked: Asking
    prefix: str
    cookie: str
    form: str


def opened(asked: Asking, form: str = "") -> _Session:
    """The path and the cookie that the link with the key leads to."""
    headers = asked.get(f"/?key={KEY}", Authorization="").headers
    cookie = headers["set-cookie"].partition(";")[0]
    return _Session(asked, prefix(headers["location"]), cookie, form)


def posted(session: _Session, path: str = "", **headers: str) -> int:
    """The status of a form that is sent with the cookie."""
    sent = {"Authorization": "", "Content_Type": FORM, "Cookie": session.cookie} | headers
    body = "reward=1&feedback_id=x&tab=//evil.example"  # sent twice, it is given once
    answer = session.asked.ask("POST", session.prefix + (path or session.form), body, **sent)
    assert "evil" not in answer.headers.get("location", "")
    return answer.status


def test_a_form_comes_from_our_own_pages(served: Callable[..., str], store: Store) -> None:
    """From no other site, no other port, and no page that hides where it is."""
    store.add([Span("1" * 32, "2" * 16, None, "work", 1, 2)])
    base = served(store, "", key=KEY)
    port = urlsplit(base).port
    session = opened(Asking(base), f"/traces/{'1' * 32}/spans/{'2' * 16}/reward")
    other = opened(Asking(served(store, "", key=KEY)))

    assert posted(session, Origin=base) == 303
    assert posted(session, Sec_Fetch_Site="same-origin") == 303
    for headers in (
        {}, {"Origin": "null"}, {"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "none"},
        {"Origin": f"http://127.0.0.1:{port + 1 if port else 1}"}, {"Origin": "file://"},
        {"Origin": f"http://localhost:{port}"},
        {"Origin": base, "Sec_Fetch_Site": "same-site"},
        {"Origin": base, "Sec_Fetch_Site": "cross-site"},
    ):  # fmt: skip
        assert posted(session, **headers) == 403, headers
    assert posted(session, Origin=base, Host="evil.example") == 421
    assert posted(session, Origin=base, Cookie=f"{session.cookie}x") == 401
    assert posted(session, Origin=base, Cookie=f"lightning_otel={KEY}") == 401
    assert posted(session, Origin=base, Cookie=other.cookie) == 401
    assert posted(session._replace(prefix=""), Origin=base) == 401
    assert posted(session._replace(prefix=other.prefix), Origin=base) == 401
    bearer = f"Bearer {session.cookie.partition('=')[2]}"
    assert posted(session, Origin=base, Cookie="", Authorization=bearer) == 401
    assert posted(session, Origin=base, Content_Type="text/plain") == 415
    assert posted(session, Origin=base, Content_Type="multipart/form-data; boundary=x") == 415
    assert posted(session, "/v1/traces", Origin=base) == 415


def test_a_link_leads_to_this_server_alone(ask: Ask, store: Store) -> None:
    """Whatever stands in its path; what else was asked stays, and the key is gone."""
    for asked, told in (
        (f"/?key={KEY}", "/"),
        (f"/sql?q=a+%26+b&key={KEY}&x=", "/sql?q=a+%26+b&x="),
        (f"//evil.example/x?key={KEY}", "/evil.example/x"),
        (f"///evil.example?key={KEY}", "/evil.example"),
    ):
        answer = ask(store, asked, Authorization="")
        assert answer.status == 303
        assert re.fullmatch(r"/v-[\w-]{22}" + re.escape(told), answer.headers["location"])
    elsewhere = ask(store, f"/?key={KEY}", Authorization="", Sec_Fetch_Site="cross-site",
                    Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document")  # fmt: skip
    framed = ask(store, f"/?key={KEY}", Authorization="", Sec_Fetch_Site="cross-site",
                 Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="iframe")  # fmt: skip

    assert (elsewhere.status, framed.status) == (200, 403)
    assert b"url=/" in elsewhere.body
    assert KEY.encode() not in elsewhere.body


class _Linking(Handler):
    """A page with one link, to what its query says."""

    cookies: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.cookies.append(self.headers.get("Cookie", ""))
        text = f'<!doctype html><a href="{escape(self.path.partition("?")[2])}">look</a>'.encode()
        self.send(text, "text/html")


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """Another site: by its name, as a browser sees it."""
    with listen(_Linking) as url:
        yield f"{url.replace('127.0.0.1', 'localhost')}/"


def test_a_link_from_another_site_opens_for_who_has_the_key(
    served: Callable[..., str], store: Store, browser: Any, elsewhere: str
) -> None:
    """The page comes to the browser with the cookie, and to no other; what opened it sees none."""
    base = served(store, "", key=KEY)
    page = browser.new_page()
    page.goto(f"{base}/?key={KEY}")
    below = base + prefix(page.url)

    # With the address that it had, and with a plain one.
    for address in (below, base):
        page.goto(f"{elsewhere}?{address}/settings?a=1%26b")
        page.get_by_role("link", name="look").click()
        page.wait_for_url(f"{below}/settings?a=1%26b")
    page.get_by_role("heading", name="Settings and doctor").wait_for()
    page.goto(f"{elsewhere}?{base}/settings")
    with page.expect_popup() as opened:
        page.evaluate("address => { window.seen = open(address) }", f"{base}/settings")
    opened.value.get_by_role("heading", name="Settings and doctor").wait_for()
    is_cut_off = page.evaluate("window.seen.closed")
    page.evaluate(
        "address => document.body.append("
        "Object.assign(document.createElement('iframe'), {src: address, name: 'framed'}))",
        f"{base}/settings",
    )
    page.wait_for_timeout(500)
    framed = page.frame("framed").content()
    stranger = browser.new_context().new_page()
    stranger.goto(f"{elsewhere}?{base}/settings")
    stranger.get_by_role("link", name="look").click()
    stranger.get_by_text("this needs the key").wait_for()
    stranger.context.close()
    opened.value.close()
    page.close()

    assert is_cut_off
    assert "Settings" not in framed


def test_no_other_port_is_sent_the_cookie(
    served: Callable[..., str], store: Store, browser: Any, elsewhere: str
) -> None:
    """Nor the key, whatever is asked of it; the cookie ends with the browser and the server."""
    context = browser.new_context()
    page = context.new_page()
    base = served(store, "", key=KEY)
    page.goto(f"{base}/?key={KEY}")
    below = prefix(page.url)
    _Linking.cookies.clear()
    for path in ("/", "/settings", "/v-/", "/v1/events"):
        page.goto(f"http://127.0.0.1:{urlsplit(elsewhere).port}{path}")
    sent, cookies = list(_Linking.cookies), context.cookies()
    context.close()

    assert len(sent) >= 4
    assert set(sent) == {""}
    assert [(each["path"], each["expires"]) for each in cookies] == [(below, -1)]
    assert KEY not in cookies[0]["value"]


def test_the_session_path_needs_no_slash(served: Callable[..., str], store: Store) -> None:
    """It leads to the home page; without the cookie it is refused as any other."""
    session = opened(Asking(served(store, "", key=KEY)))
    path = session.prefix

    led = session.asked.get(f"{path}?by=time", Authorization="", Cookie=session.cookie)
    without = [session.asked.get(each, Authorization="") for each in (path, path[:-1], f"{path}/")]

    assert (led.status, led.headers["location"]) == (308, f"{path}/?by=time")
    assert {each.status for each in without} == {401}


@pytest.mark.parametrize("path", ["/", "/sql", "/settings", "/v1/events", "/home/funnel"])
def test_nothing_is_read_without_the_key(ask: Ask, store: Store, path: str) -> None:
    """Nor by a page of another site, nor under a foreign name; with it and from here it is."""
    for headers, status in (
        ({"Authorization": ""}, 401),
        ({"Authorization": f"Bearer {KEY}x"}, 401),
        ({"Sec_Fetch_Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 421),
    ):
        assert ask(store, path, **headers).status == status, headers


def test_ui_opens_the_browser_with_a_private_page(tmp_path: Path, browser: Any) -> None:
    """Nobody sees the key among its arguments; the page leads on to one without the key."""
    opened = tmp_path / "opened"
    opener = tmp_path / "bin" / "xdg-open"
    opener.parent.mkdir()
    opener.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    opener.chmod(0o755)
    running = subprocess.Popen(
        [sys.executable, "-m", "lightning_otel", "ui", "--open", "--port", "0",
         "--store", str(tmp_path / "s.duckdb")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PATH": f"{opener.parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    try:
        assert running.stdout is not None
        link = running.stdout.readline().strip()
        key_file = tmp_path / "s.duckdb.d" / "viewer.key"
        key = key_file.read_text().strip()
        page = browser.new_page()
        while not opened.exists() or not (address := opened.read_text().strip()):
            page.wait_for_timeout(20)
        page_file = Path(address)
        mode = stat.S_IMODE(page_file.stat().st_mode)
        page.goto(page_file.as_uri())
        page.wait_for_url(re.compile(re.escape(link.partition("/?")[0]) + r"/v-[\w-]{22}/"))
        title, cookies, text = page.title(), page.context.cookies(), page.content()
        page.close()
    finally:
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=20)

    assert link.endswith(f"/?key={key}")
    assert key not in address
    assert (mode, stat.S_IMODE(key_file.stat().st_mode)) == (0o600, 0o600)
    assert title.startswith("Home")
    assert len(cookies) == 1
    assert key not in cookies[0]["value"] + text
    assert not page_file.exists()


def test_the_key_stays_and_is_told_in_one_place(tmp_path: Path) -> None:
    """Another server of the store has the same key; no log gets it, nor a token out of a file."""
    from tests.serve.serving import Serving

    store = tmp_path / "s.duckdb"
    with Serving(store, "--port", "0") as first:
        key, (_, said) = first.key, first.end()
    token_file = tmp_path / "token"
    with Serving(store, "--port", "0", "--token-file", str(token_file)) as second:
        of_key = second.ask("GET", "/v1/status", authorization=f"Bearer {key}").status
        token = token_file.read_text().strip()
        of_token = second.ask("GET", "/v1/status", authorization=f"Bearer {token}").status
        again, (_, said_again) = second.key, second.end()

    assert key not in said
    assert f"/?key=KEY, with the key in {store}.d/viewer.key" in said
    assert again == key
    assert token not in said_again
    assert (of_key, of_token) == (401, 200)
