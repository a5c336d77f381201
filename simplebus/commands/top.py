"""`simplebus top`: what the live page shows, in a terminal.

Rule 1: it knows nothing of what the figures are about: titles, units and tables come with them.
Rule 2: what comes from outside is text: control characters are shown as escapes, markup as it is.
"""

from __future__ import annotations

import base64
import json
import os
import time
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from simplebus.config.parse import option, parse_seconds
from simplebus.console.errors import fail

if TYPE_CHECKING:
    import ssl
    from urllib.request import OpenerDirector

    from rich.console import Console, RenderableType
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from simplebus.client.credentials import Access

HTTP = "http://127.0.0.1:8222"
HELP = (
    "Watch a server, a bridge or a gateway in the terminal.\n\n\b\n"
    "  simplebus top\n"
    "  simplebus top http://bus:8222\n"
    "  simplebus top --once                a snapshot, for people\n"
    "  simplebus top --json                the same for scripts\n\n"
    "It shows what the live page shows: rates, classes, who is slow and why. It ends with Ctrl-C."
)
_PATIENCE_SECONDS = 5.0
_ANSWER_BYTES_MAX = 16 * 1024 * 1024
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LINE_CHARACTERS = 40
_ROWS_ONCE = 1000
_WIDTH_ONCE = 160
_FRAME = 4
"""Columns that the frame takes."""
_COLUMNS_AT = 100
"""From this width on figures stand in columns."""
_TEXT_CHARACTERS = 24
"""A text has so many of its characters before another column has to go."""

Speeds: TypeAlias = dict[str, list[float | None]]
"""How fast the cells of a row grow, by its first cells; None for those that do not."""


class Facts:
    """What is asked for, again and again."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for what is no address of an HTTP door, OSError for a certificate that
        is no good."""
        from simplebus.client.credentials import Access

        self._url = _checked(url if "://" in url else f"http://{url}")
        access = Access.from_environment()
        self._headers = _credentials(access)
        self._opener = _straight(access.tls() if self._url.startswith("https://") else None)
        self._before: dict[str, tuple[float, dict[str, list[Any]]]] = {}

    def fetch(self) -> dict[str, Any]:
        """Raises OSError with a sentence."""
        import http.client
        import ssl
        import urllib.error
        import urllib.request

        asked = urllib.request.Request(f"{self._url}/facts", headers=self._headers)
        other = OSError(f"{self._url} is no HTTP door of simplebus; that is port 8222 or as told")
        try:
            with self._opener.open(asked, timeout=_PATIENCE_SECONDS) as answer:
                said = json.loads(answer.read(_ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            with error:
                raise OSError(f"{self._url} says {error.code} {escape_controls(error.reason)}") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise OSError(
                    f"{self._url} shows a certificate that is not trusted "
                    f"({error.reason.verify_message}): --tls-ca says who may have signed it"
                ) from None
            raise OSError(f"{self._url} does not answer: {error.reason}") from None
        except http.client.RemoteDisconnected:
            raise OSError(
                f"{self._url} hangs up without an answer; if it speaks TLS, it is https://…"
            ) from None
        except (http.client.HTTPException, ValueError, RecursionError):
            raise other from None
        except OSError as error:  # While the answer is read.
            raise OSError(f"{self._url} does not answer: {error}") from None
        if not isinstance(said, dict) or "facts" not in said:
            raise other
        return said

    def growth_rates(self, said: dict[str, Any], now: float) -> dict[str, Speeds]:
        """How fast figures grow, by table."""
        return {table["key"]: self._rates(table, now) for table in said["facts"]["tables"]}

    def _rates(self, table: dict[str, Any], now: float) -> Speeds:
        rows = {_key(row): row for row in table["rows"]}
        known = self._before.get(table["key"])
        self._before[table["key"]] = now, rows
        if known is None or now <= known[0]:
            return {}
        passed, before = now - known[0], known[1]
        return {
            key: [
                max(0.0, (value - old) / passed)
                if isinstance(value, int | float) and isinstance(old, int | float)
                else None
                for value, old in zip(row, before[key], strict=True)
            ]
            for key, row in rows.items()
            if key in before
        }


def _straight(tls: ssl.SSLContext | None) -> OpenerDirector:
    """What asks the door itself: by no proxy, and nobody to whom it would send us on, as who we are
    is for nobody else."""
    import urllib.request  # It brings TLS and more, which help does without.

    class Nowhere(urllib.request.HTTPRedirectHandler):
        """Goes to no other place."""

        def redirect_request(self, *_: Any) -> None:
            return None

    by = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls), Nowhere())
    return urllib.request.build_opener(*by)


def _checked(url: str) -> str:
    """An address of an HTTP door. Raises ValueError, without any secret that stands in it."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    if parts.username is not None:
        raise ValueError(
            "who to be does not stand in the address: --user, SIMPLEBUS_USER and SIMPLEBUS_PASSWORD"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected http://HOST:PORT, got {url!r}")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"expected a port from 1 to 65535, got {url!r}") from None
    return url.rstrip("/")


def _key(row: list[Any]) -> str:
    return "\n".join(cell for cell in row[:2] if isinstance(cell, str))


def _credentials(access: Access) -> dict[str, str]:
    if access.token:
        return {"Authorization": f"Bearer {access.token}"}
    if not access.user:
        return {}
    both = base64.b64encode(f"{access.user}:{access.password}".encode()).decode()
    return {"Authorization": f"Basic {both}"}


def top(
    url: Annotated[
        str,
        typer.Argument(
            metavar="[URL]",
            envvar="SIMPLEBUS_HTTP_URL",
            show_envvar=False,
            help="Its HTTP door: what `serve --http-port` opens, or --http of a bridge or gateway.",
        ),
    ] = HTTP,
    once: Annotated[bool, typer.Option("--once", help="Print a snapshot, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a snapshot as JSON, and end.")
    ] = False,
    interval: Annotated[
        float,
        option(
            "--interval",
            "How often it looks, in seconds.",
            parser=parse_seconds,
            metavar="SECONDS",
            show_default="1",
        ),
    ] = 1.0,
) -> None:
    try:
        facts = Facts(url)
        said = facts.fetch()
    except (OSError, ValueError) as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(said, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console()
    now = time.monotonic()
    if once or not console.is_terminal:
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = _WIDTH_ONCE
        console.print(shown(said, facts.speeds(said, now), rows=_ROWS_ONCE))
        return
    _watch(console, facts, said, max(0.1, interval))


def _watch(console: Console, facts: Facts, said: dict[str, Any], interval: float) -> None:
    from rich.live import Live

    problem = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                said, problem = facts.fetch(), ""
            except OSError as error:
                problem = str(error)
            speeds = facts.growth_rates(said, time.monotonic())
            live.update(fitted(console, said, speeds, problem), refresh=True)
            time.sleep(interval)


def fitted(
    console: Console, said: dict[str, Any], speeds: dict[str, Speeds], problem: str = ""
) -> Panel:
    """A snapshot with as many rows of each table as there is place for. A `problem` is why there is
    no newer one."""
    from rich.text import Text

    fewest, most = 1, console.height
    picture = shown(said, speeds, rows=1, width=console.width)
    while fewest < most:
        rows = (fewest + most + 1) // 2
        tried = shown(said, speeds, rows=rows, width=console.width)
        if len(console.render_lines(tried)) <= console.height:
            picture, fewest = tried, rows
        else:
            most = rows - 1
    if problem:
        picture.title = Text(escape_controls(problem), style="bold red")
    return picture


def shown(
    said: dict[str, Any], speeds: dict[str, Speeds], *, rows: int, width: int | None = None
) -> Panel:
    """A snapshot as it is printed, with at most so many rows of each table. With a width, each row
    is one line, and what is least worth it is left out."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    found = said["facts"]
    health = found["health"]
    word = "draining" if health["draining"] else "ready" if health["ready"] else "not ready"
    colour = {"ready": "green", "draining": "yellow", "not ready": "red"}[word]
    inside = None if width is None else width - _FRAME
    parts: list[RenderableType] = [_rates(said["rates"], inside), _tiles(found["tiles"], inside)]
    for note in found["notes"][:rows]:
        style, sign = ("red", "▲ ") if note["is_bad"] else ("yellow", "• ")
        about = Text(f"{escape_controls(note['about'])}: ", style="bold")
        parts.append(Text(sign, style=style) + about + escape_controls(note["sentence"]))
    for table in found["tables"]:
        if table["rows"]:
            parts.append(_table(table, speeds.get(table["key"], {}), rows, inside))
    if health["why"]:
        word = f"{word}: {escape_controls(health['why'])}"
    title = Text(f"● {word} ", style=colour) + Text(escape_controls(found["title"]), style="bold")
    title += Text(f" {escape_controls(found['subtitle'])}", style="dim")
    return Panel(Group(*parts), title=title, title_align="left")


def _rates(rates: dict[str, Any], width: int | None) -> RenderableType:
    from rich.table import Table

    lines = [
        (plain(name), f"{figure(line[-1] or 0.0 if line else 0.0, 'rate')}/s", line)
        for name, line in rates["flows"].items()
    ]
    characters = _LINE_CHARACTERS
    if width is not None:
        taken = sum(max((len(each[at]) for each in lines), default=0) + 2 for at in range(2))
        characters = max(0, min(characters, width - taken))
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column()
    for name, now, line in lines:
        seen = [value or 0.0 for value in line[len(line) - characters :]]
        grid.add_row(name, now, sparkline(seen) if characters else "")
    return grid


def sparkline(values: list[float]) -> str:
    """A line of blocks, as high as the values are."""
    most = max(values, default=0.0)
    if most <= 0:
        return _BLOCKS[1] * len(values)
    return "".join(_BLOCKS[1 + round(value / most * (len(_BLOCKS) - 2))] for value in values)


def _tiles(tiles: list[dict[str, Any]], width: int | None) -> RenderableType:
    from rich.columns import Columns
    from rich.text import Text

    made = [
        Text(figure(tile["value"], tile["unit"] or "count"), style="bold")
        + Text(f" {escape_controls(tile['title'])}", style="dim")
        for tile in tiles
    ]
    if width is None or width >= _COLUMNS_AT:
        return Columns(made, padding=(0, 3))
    lines: list[list[Text]] = [[]]
    for each in made:
        if lines[-1] and sum(len(one) + 3 for one in lines[-1]) + len(each) > width:
            lines.append([])
        lines[-1].append(each)
    return Text("\n").join(Text("   ").join(line) for line in lines)


def _table(table: dict[str, Any], speeds: Speeds, rows: int, width: int | None) -> Table:
    from rich.table import Table
    from rich.text import Text

    left_out = table["left_out"] + max(0, len(table["rows"]) - rows)
    title = escape_controls(table["title"]) + (f", and {left_out:,} more" if left_out else "")
    made = Table(
        title=Text(title, style="italic"),
        title_justify="left",
        box=None,
        padding=(0, 1),
        header_style="bold underline",
    )
    columns = table["columns"]
    cells = [_cells(row, columns, speeds.get(_key(row), [])) for row in table["rows"][:rows]]
    kept = _kept(columns, cells, width)
    for at, characters in kept.items():
        is_text = columns[at]["unit"] == "text"
        made.add_column(
            escape_controls(columns[at]["title"]),
            justify="left" if is_text else "right",
            overflow="fold" if width is None else "ellipsis",
            no_wrap=width is not None,
            width=characters,
        )
    for line in cells:
        made.add_row(*(line[at] for at in kept))
    return made


def _cells(row: list[Any], columns: list[dict[str, Any]], speeds: list[float | None]) -> list[Text]:
    from rich.text import Text

    made = []
    for at, (cell, column) in enumerate(zip(row, columns, strict=True)):
        text = Text(figure(cell, column["unit"]))
        if column["is_flow"] and speeds and speeds[at]:
            unit = "bytes" if column["unit"] == "bytes" else "rate"
            text += Text(f" {figure(speeds[at], unit)}/s", style="dim")
        made.append(text)
    return made


def _kept(
    columns: list[dict[str, Any]], cells: list[list[Text]], width: int | None
) -> dict[int, int | None]:
    """Which columns there is place for, and how wide each is, None for as it comes. First those go
    in which there is nothing, then the last ones; texts are cut short."""
    if width is None:
        return dict.fromkeys(range(len(columns)))
    longest = [
        max(len(column["title"]), *(len(line[at]) for line in cells))
        for at, column in enumerate(columns)
    ]
    kept: dict[int, int | None] = {
        at: min(size, _TEXT_CHARACTERS) if columns[at]["unit"] == "text" else size
        for at, size in enumerate(longest)
    }

    def left() -> int:
        return width - sum((size or 0) + 2 for size in kept.values())

    empty = [at for at in kept if all(line[at].plain in ("0", "–", "0 B") for line in cells)]
    last = [at for at in kept if at not in empty]
    for at in (*reversed(empty), *reversed(last[1:])):
        if left() >= 0:
            break
        del kept[at]
    for at, size in kept.items():
        kept[at] = (size or 0) + max(0, min(left(), longest[at] - (size or 0)))
    return kept


def figure(value: Any, unit: str) -> str:
    """A cell as people read it."""
    if value is None or value == "":
        return "–"
    if isinstance(value, str):
        return escape_controls(value)
    if unit == "bytes":
        return _bytes(value)
    if unit == "seconds":
        return _seconds(value)
    if unit == "rate" and 0 < value < 10:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _seconds(value: float) -> str:
    if not value:
        return "–"
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if value < size * 1000:
            return f"{value / size:.3g} {unit}"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def escape_controls(text: str) -> str:
    """A text without anything that a terminal would obey."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )
