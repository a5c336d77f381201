"""Tables of a report, and the HTML page with them."""

from __future__ import annotations

from html.parser import HTMLParser

from simplebus.spark.commands.report import build_tables
from simplebus.spark.jobs.report.page import render_page
from simplebus.spark.jobs.report.summary import COUNTS, KEY, LATENCIES, ReportSummary, RoundSpread


def summary(name: str, rounds: int = 1, **counts: int) -> ReportSummary:
    key = dict.fromkeys(KEY) | {"scenario": "flow", "variant": name}
    return ReportSummary(
        key,
        rounds,
        dict.fromkeys(COUNTS) | {"delivered": 2_000_000, **counts},
        RoundSpread(4_310_000, 27.5, 5e6),
        dict.fromkeys(LATENCIES) | {"p50_us": RoundSpread(85, 80, 90)},
    )


class TextParser(HTMLParser):
    """Collects the texts of a page by the tag around them, and checks that tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.errors: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if "error" in (dict(attrs).get("class") or ""):
            self.errors.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.setdefault(self.open[-1], []).append(data)


def test_page_has_the_tables_and_the_chart() -> None:
    tables = build_tables([summary("<plain>"), summary("TLS & more", lost=3)])
    page = render_page("A <title>", "of traces", tables, b"PNG")
    found = TextParser()
    found.feed(page)
    assert not found.open
    assert found.texts["h1"] == ["A <title>: of traces"]
    assert found.texts["h2"] == ["flow"]
    assert found.texts["th"][:4] == ["variant", "msgs/s", "delivered", "lost"]
    assert found.texts["td"] == [
        *("<plain>", "4.31 M", "2 M", "85 us"),
        *("TLS & more", "4.31 M", "2 M", "3", "85 us"),
    ]
    assert found.errors == ["td"]
    assert 'src="data:image/png;base64,UE5H"' in page
    assert "http:" not in page.replace("https:", "http:")


def test_tables_of_several_rounds_have_spreads() -> None:
    (table,) = build_tables([summary("a", rounds=5)])
    assert table.title == "flow: medians of 5 rounds, counts of all of them"
    assert [cell.text for cell in table.rows[0]][:4] == ["a", "4.31 M", "27.5", "5 M"]
    assert (table.headers[:4], table.text_columns) == (["variant", "msgs/s", "least", "most"], 1)
