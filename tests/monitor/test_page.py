"""Tests of the live page in a real Chromium."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import simplebus
from tests.support.browser import Browser, open_browser
from tests.support.programs import Program, run_server

pytestmark = pytest.mark.xdist_group("browser")

HOSTILE = "<img src=x onerror=document.title='owned'>"
TAB, ENTER, LEFT = "\ue004", "\ue007", "\ue012"


@dataclass
class LivePage:
    """The live page in a browser, and the server that it shows."""

    browser: Browser
    program: Program
    url: str

    def fetch_metrics(self) -> dict[tuple[str, str], float]:
        """Return the metric values by name and class."""
        with urllib.request.urlopen(
            f"http://{self.program.http_address}/metrics", timeout=60
        ) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name.removeprefix("simplebus_"), sample.labels.get("class", "")): sample.value
            for family in families
            for sample in family.samples
        }

    def read_table(self, key: str) -> list[dict[str, str]]:
        """Return the rows of a table, each by column title."""
        return self.browser.run_script(  # type: ignore[no-any-return]
            """
            const table = document.querySelector(`#table-${arguments[0]} table`);
            if (!table) return [];
            const titles = [...table.tHead.querySelectorAll("button")].map((b) => b.textContent);
            return [...table.tBodies[0].rows].map((row) => Object.fromEntries(
              [...row.cells].map((cell, at) =>
                [titles[at], cell.querySelector(".value").textContent])));
            """,
            key,
        )

    def wait_refresh(self) -> None:
        """Wait until the page has refreshed twice: the first refresh may show older data."""
        refresh_count = "Number(document.body.dataset.updates || 0)"
        before_ = int(self.browser.run_script(f"return {refresh_count}"))
        self.browser.wait_until(f"return {refresh_count} >= arguments[0]", before_ + 2)


@pytest.fixture(scope="module")
def live_page() -> Iterator[LivePage]:
    with (
        run_server("--host", "127.0.0.1") as (program, url),
        open_browser() as page,
        simplebus.connect_blocking(url, name="till <b>1</b>") as bus,
    ):
        bus.publish_many([b"x" * 100] * 1234, class_id="orders")
        bus.publish(b"x", class_id=HOSTILE)
        bus.flush()
        with bus.subscribe("orders", durable="billing") as messages:
            next(iter(messages.batches()))
        bus.flush()
        page.set_viewport(width=1280, height=900)
        page.open(f"http://{program.http_address}/")
        page.wait_until("return document.querySelector('#table-classes tbody tr') !== null")
        yield LivePage(page, program, url)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_page_shows_the_values_of_the_metrics(live_page: LivePage) -> None:
    live_page.wait_refresh()
    rows, metrics = (
        {row["Class"]: row for row in live_page.read_table("classes")},
        live_page.fetch_metrics(),
    )
    assert rows.keys() == {"orders", HOSTILE}
    for name, row in rows.items():
        for column, metric in (
            ("Published", "published_messages_total"),
            ("Delivered", "delivered_messages_total"),
            ("Acknowledged", "acknowledged_messages_total"),
            ("Redelivered", "redelivered_messages_total"),
            ("Stored", "stored_messages"),
            ("In flight", "in_flight_messages"),
            ("Lag", "lag_messages"),
            ("Subscriptions", "subscriptions"),
        ):
            assert number(row[column]) == metrics[metric, name], (name, column)
    assert number(rows["orders"]["Published"]) == 1234
    tiles = dict(
        live_page.browser.run_script(
            "return [...document.querySelectorAll('#tiles div')]"
            ".map((tile) => [tile.children[0].textContent, tile.children[1].textContent])"
        )
    )
    assert number(tiles["Dead letters"]) == metrics["dead_letters", ""]


def test_names_are_shown_as_text(live_page: LivePage) -> None:
    page = live_page.browser
    live_page.wait_refresh()
    assert page.run_script("return document.title").startswith("simplebus")
    assert page.run_script("return document.querySelectorAll('img, main b b, iframe').length") == 0
    assert HOSTILE in page.run_script("return document.body.textContent")
    assert "till <b>1</b>" in page.run_script("return document.body.textContent")


def test_page_loads_only_from_the_server_without_browser_errors(live_page: LivePage) -> None:
    loaded = live_page.browser.run_script(
        "return performance.getEntriesByType('resource').map((e) => e.name)"
    )
    assert loaded
    assert all(name.startswith(f"http://{live_page.program.http_address}/") for name in loaded)
    assert live_page.browser.read_log() == []


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
@pytest.mark.parametrize("darker", [False, True])
def test_page_fits_its_window(live_page: LivePage, width: int, darker: bool) -> None:
    page = live_page.browser
    page.set_viewport(width=width, height=800, dark=darker)
    page.run_script("window.dispatchEvent(new Event('resize'))")
    scroll_width = page.run_script("return document.documentElement.scrollWidth")
    assert scroll_width <= width
    ground = page.run_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 300) is darker
    page.set_viewport(width=1280, height=900)


def test_table_can_be_sorted_by_keyboard(live_page: LivePage) -> None:
    page = live_page.browser
    second = "document.querySelector('#table-classes th:nth-child(2)')"
    head = f"return {second}.getAttribute('aria-sort')"
    page.run_script(f"{second}.querySelector('button').focus()")
    page.press_keys(ENTER)
    assert page.run_script(head) == "descending"
    assert [row["Class"] for row in live_page.read_table("classes")] == ["orders", HOSTILE]
    page.press_keys(ENTER)
    assert page.run_script(head) == "ascending"
    assert [row["Class"] for row in live_page.read_table("classes")] == [HOSTILE, "orders"]
    live_page.wait_refresh()
    assert page.run_script("return document.activeElement.textContent") == "Published"
    page.press_keys(ENTER)
    assert page.run_script(head) is None


def test_tables_can_be_searched(live_page: LivePage) -> None:
    page = live_page.browser
    type_text = (
        "const search = document.getElementById('search'); search.value = arguments[0];"
        "search.dispatchEvent(new Event('input'))"
    )
    page.run_script(type_text, "ORD")
    assert [row["Class"] for row in live_page.read_table("classes")] == ["orders"]
    page.run_script(type_text, "nothing")
    empty = "return document.querySelector('#table-classes .empty').textContent"
    assert page.run_script(empty) == "Nothing found."
    page.run_script(type_text, "")
    assert len(live_page.read_table("classes")) == 2


def test_tables_can_be_sorted_on_a_phone(live_page: LivePage) -> None:
    page = live_page.browser
    page.set_viewport(width=390, height=800)
    sorter = "#table-classes .sorter"
    assert page.run_script(f"return document.querySelector('{sorter}').checkVisibility()")
    page.run_script(
        f"const choice = document.querySelector('{sorter} select'); choice.value = arguments[0];"
        "choice.dispatchEvent(new Event('change'))",
        "1",
    )
    assert [row["Class"] for row in live_page.read_table("classes")] == ["orders", HOSTILE]
    page.run_script(
        f"const choice = document.querySelector('{sorter} select'); choice.value = '-1';"
        "choice.dispatchEvent(new Event('change'))"
    )
    page.set_viewport(width=1280, height=900)
    assert not page.run_script(f"return document.querySelector('{sorter}').checkVisibility()")


def test_chart_shows_longer_times(live_page: LivePage) -> None:
    page = live_page.browser
    text_script = "return document.getElementById('chart-summary').textContent"
    page.run_script("document.querySelector('#spans button:nth-child(2)').click()")
    page.wait_until(f"{text_script}.startsWith('Peak of the last hour: ')")
    assert page.run_script("return document.querySelectorAll('#lines path.line').length") > 1
    page.run_script("document.querySelector('#spans button:nth-child(3)').click()")
    page.wait_until(f"{text_script}.startsWith('Peak of the last day: ')")
    page.run_script("document.querySelector('#spans button').click()")
    assert "three minutes" in page.run_script(text_script)


def test_pages_of_classes_and_connections(live_page: LivePage) -> None:
    page = live_page.browser
    title = "return document.getElementById('details-title').textContent"
    for width in (390, 1280):
        page.set_viewport(width=width, height=800)
        page.run_script(
            "[...document.querySelectorAll('#table-classes tbody a')]"
            ".find((link) => link.textContent === arguments[0]).click()",
            HOSTILE,
        )
        page.wait_until(f"{title} === arguments[0]", f"Class {HOSTILE}")
        page.wait_until("return document.querySelector('#details-values dd') !== null")
        assert page.run_script("return document.querySelectorAll('img').length") == 0
        assert page.run_script("return document.documentElement.scrollWidth") <= width
        page.run_script("document.getElementById('messages-first').click()")
        text_script = "return document.getElementById('messages-status').textContent"
        page.wait_until(f"{text_script}.includes('has no users')")
        page.run_script("document.querySelector('#details a').click()")
        page.wait_until("return document.getElementById('details').hidden")
    assert page.run_script("return document.getElementById('overview').checkVisibility()")
    page.run_script("location.hash = '#class/orders'")
    page.wait_until("return document.querySelector('#table-positions tbody tr') !== null")
    assert [row["Name"] for row in live_page.read_table("positions")] == ["durable billing"]
    values = (
        "return Object.fromEntries([...document.querySelectorAll('#details-values div')]"
        ".map((tile) => [tile.children[0].textContent, tile.children[1].textContent]))"
    )
    assert number(page.run_script(values)["Next sequence"]) == 1234
    page.run_script("location.hash = ''")
    page.wait_until("return document.querySelector('#table-sessions tbody a') !== null")
    with simplebus.connect_blocking(live_page.url, name="reader") as bus, bus.subscribe("orders"):
        session = max(session.session for session in bus.explain().sessions)
        page.run_script("location.hash = arguments[0]", f"#session/{session}")
        page.wait_until("return document.querySelector('#table-positions tbody tr') !== null")
        assert [row["Class"] for row in live_page.read_table("positions")] == ["orders"]
        page.run_script("location.hash = ''")
    page.run_script("document.querySelector('#table-sessions tbody a').click()")
    page.wait_until("return document.querySelector('#details-values dd') !== null")
    assert page.run_script(values)["Name"] == "till <b>1</b>"
    page.run_script("location.hash = '#class/%'")
    page.wait_until(f"{title} === 'Class %'")
    details_script = "return document.getElementById('details-status').textContent"
    page.wait_until(f"{details_script}.includes('there is no class')")
    page.run_script("location.hash = ''")
    page.wait_until("return document.getElementById('details').hidden")
    assert [each for each in page.read_log() if "404" not in each and "403" not in each] == []


def test_page_of_a_nats_client(live_page: LivePage) -> None:
    page = live_page.browser
    host, _, port = live_page.program.nats_address.rpartition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b'CONNECT {"name":"till 9","verbose":false}\r\nSUB books.* 1\r\nPING\r\n')
        while b"PONG" not in client.recv(4096):
            pass
        page.wait_until("return document.querySelector('#table-clients tbody a') !== null")
        page.run_script("document.querySelector('#table-clients tbody a').click()")
        page.wait_until("return document.querySelector('#table-subjects tbody tr') !== null")
        assert live_page.read_table("subjects") == [{"Subject": "books.*"}]
        assert "till 9" in page.run_script(
            "return document.getElementById('details-values').textContent"
        )
    text_script = "return document.getElementById('details-status').textContent"
    page.wait_until(f"{text_script}.startsWith('There is no client')")
    page.run_script("location.hash = ''")
    page.wait_until("return document.getElementById('details').hidden")


def test_idle_classes_are_folded(live_page: LivePage) -> None:
    page = live_page.browser
    names = [f"quiet-{number}" for number in range(5)]
    with simplebus.connect_blocking(live_page.url) as bus:
        for name in names:
            bus.publish(b"x", class_id=name)
            bus.purge(name)
    live_page.wait_refresh()
    page.run_script("location.reload()")
    page.wait_until("return document.querySelector('#table-classes tbody tr') !== null")
    assert not set(names) & {row["Class"] for row in live_page.read_table("classes")}
    fold = "return document.querySelector('#table-classes .fold')"
    assert page.run_script(f"{fold}.textContent") == "Show 5 idle"
    page.run_script(f"{fold}.click()")
    assert set(names) <= {row["Class"] for row in live_page.read_table("classes")}
    assert page.run_script(f"{fold}.getAttribute('aria-expanded')") == "true"
    page.run_script(f"{fold}.click()")
    with simplebus.connect_blocking(live_page.url) as bus:
        bus.publish(b"x", class_id=names[0])
        bus.purge(names[0])
    page.wait_until(
        "return [...document.querySelectorAll('#table-classes tbody th .value')]"
        ".some((cell) => cell.textContent === arguments[0])",
        names[0],
    )


def test_chart_can_be_used_by_keyboard(live_page: LivePage) -> None:
    page = live_page.browser
    page.run_script("document.getElementById('chart').focus()")
    page.press_keys(LEFT, LEFT)
    assert page.run_script("return document.getElementById('tip').textContent").startswith(
        "2 s ago\n"
    )
    page.run_script("document.querySelector('#legend button').focus()")
    assert page.run_script("return document.getElementById('tip').hidden")
    pressed = "return document.activeElement.getAttribute('aria-pressed')"
    lines = "return document.querySelectorAll('#lines path.line').length"
    before_ = page.run_script(lines)
    page.press_keys(ENTER)
    assert (page.run_script(pressed), page.run_script(lines)) == ("false", before_ - 1)
    page.press_keys(ENTER)
    assert (page.run_script(pressed), page.run_script(lines)) == ("true", before_)


def test_controls_have_names_and_visible_focus(live_page: LivePage) -> None:
    page = live_page.browser
    unnamed = page.run_script(
        "return [...document.querySelectorAll('button, a, [tabindex=\"0\"], summary')].filter("
        "(e) => !(e.textContent.trim() || e.getAttribute('aria-label'))).map((e) => e.outerHTML)"
    )
    assert unnamed == []
    page.open(f"http://{live_page.program.http_address}/")
    live_page.wait_refresh()
    page.press_keys(TAB)
    assert page.run_script("return document.activeElement.textContent") == "Skip to the data"
    for _ in range(8):
        page.press_keys(TAB)
        style = page.run_script("return getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid", page.run_script("return document.activeElement.outerHTML")
    heads: list[Any] = page.run_script(
        "return [...document.querySelectorAll('h1, h2')].map((e) => e.tagName)"
    )
    assert heads[0] == "H1"
    assert heads.count("H1") == 1


@pytest.mark.parametrize("width", [390, 1280])
def test_dead_letters_can_be_requeued_and_dropped(tmp_path: Path, width: int) -> None:
    users = tmp_path / "users.toml"
    users.write_text('[[users]]\nname = "ops"\ntoken = "a token of the operators"\n')
    users.chmod(0o600)
    token = "a token of the operators"
    with (
        run_server("--host", "127.0.0.1", "--users", str(users)) as (program, url),
        simplebus.connect_blocking(url, token=token) as bus,
        open_browser() as page,
    ):
        with bus.subscribe("orders", auto_ack=False) as messages:
            for payload in (b"first", HOSTILE.encode()):
                bus.publish(payload, class_id="orders")
            for message in islice(messages, 2):
                message.terminate("broken")
            bus.flush()
        page.set_viewport(width=width, height=800)
        page.command("Network.enable")
        headers = {"Authorization": f"Bearer {token}"}
        page.command("Network.setExtraHTTPHeaders", headers=headers)
        page.open(f"http://{program.http_address}/")
        page.wait_until("return document.querySelector('#letter-classes button') !== null")
        page.run_script("location.hash = '#class/orders'")
        page.wait_until("return document.querySelector('#letter-classes button') !== null")
        page.run_script("document.querySelector('#letter-classes button').click()")
        count = "return document.querySelectorAll('#letters li').length === arguments[0]"
        page.wait_until(count, 2)
        text = page.run_script("return document.getElementById('letters').textContent")
        assert "terminated at delivery 1: broken" in text
        assert HOSTILE in text
        assert page.run_script("return document.querySelectorAll('img').length") == 0
        assert page.run_script("return document.documentElement.scrollWidth") <= width
        text_script = (
            "return document.getElementById('letters-status').textContent.startsWith(arguments[0])"
        )
        page.run_script("document.querySelector('#letters li button').click()")
        page.wait_until(text_script, "#0 was requeued.")
        page.wait_until(count, 1)
        drop = "document.querySelector('#letters li button:last-child').click()"
        page.run_script(drop)
        label = "return document.querySelector('#letters button:last-child').textContent"
        assert page.run_script(label) == "Really drop?"
        assert bus.explain("dead.orders").stored == 1
        page.run_script(drop)
        page.wait_until(text_script, "#1 was dropped.")
        page.wait_until(count, 0)
        assert bus.explain("orders").head == 3
        page.run_script("document.getElementById('messages-first').click()")
        page.wait_until("return document.querySelector('#messages pre')?.textContent === 'first'")
        session = bus.explain().sessions[0].session
        page.run_script("location.hash = arguments[0]", f"#session/{session}")
        page.wait_until("return !document.getElementById('disconnect').hidden")
        page.run_script("document.getElementById('disconnect').click()")
        assert page.run_script("return document.getElementById('disconnect').textContent") == (
            "Really disconnect?"
        )
        page.run_script("document.getElementById('disconnect').click()")
        page.wait_until(
            "return document.getElementById('disconnect-status').textContent === arguments[0]",
            f"disconnected session {session}",
        )
        assert page.run_script("return document.documentElement.scrollWidth") <= width


def test_dead_letters_need_users(live_page: LivePage) -> None:
    with simplebus.connect_blocking(live_page.url) as bus:
        bus.publish(b"x", class_id="dead.lost")
    page = live_page.browser
    page.wait_until("return document.querySelector('#letter-classes button') !== null")
    page.run_script("document.querySelector('#letter-classes button').click()")
    text_script = "return document.getElementById('letters-status').textContent"
    page.wait_until(f"{text_script}.includes('has no users')")


def test_page_can_be_paused_and_shows_lost_connections(live_page: LivePage) -> None:
    page = live_page.browser
    health = "return document.getElementById('health').textContent"
    page.run_script("document.getElementById('pause').click()")
    assert page.run_script(health) == "paused"
    refresh_count = page.run_script("return document.body.dataset.updates")
    page.run_script("document.getElementById('pause').click()")
    page.wait_until(
        "return Number(document.body.dataset.updates) > Number(arguments[0])", refresh_count
    )
    assert page.run_script(health) == "ready"
    live_page.program.process.kill()
    page.wait_until(f"{health} === 'no answer'")


# Without a browser -------------------------------------------------------------------------------


def _luminance(colour: str) -> float:
    parts = [int(colour[offset : offset + 2], 16) / 255 for offset in (1, 3, 5)]
    red, green, blue = (((part + 0.055) / 1.055) ** 2.4 for part in parts)  # Not exact near black.
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_contrast_is_sufficient_in_both_color_schemes() -> None:
    css = resources.files("simplebus.monitor").joinpath("files", "page.css").read_text("utf-8")
    sets = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    assert len(sets) == 2
    for text in sets:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text))
        pairs = [
            (ink, on) for ink in ("ink", "quiet", "link") for on in ("ground", "sheet", "soft")
        ]
        pairs += [(kind, f"{kind}-ground") for kind in ("good", "bad", "wait")]
        pairs += [("ink", f"{kind}-ground") for kind in ("good", "bad", "wait")]
        for front, background in pairs:
            lighter, darker = sorted((_luminance(colours[front]), _luminance(colours[background])))[
                ::-1
            ]
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (front, background)
        for line in range(8):
            lighter, darker = sorted(
                (_luminance(colours[f"line-{line}"]), _luminance(colours["sheet"]))
            )[::-1]
            assert (lighter + 0.05) / (darker + 0.05) >= 3, line


def test_page_script_builds_no_markup_from_text() -> None:
    script = resources.files("simplebus.monitor").joinpath("files", "page.js").read_text("utf-8")
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "://",
    ):
        assert forbidden not in script.replace('"http://www.w3.org/2000/svg"', ""), forbidden
