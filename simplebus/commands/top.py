"""`simplebus top`: what the live page shows, in a terminal.

Rule 1: it knows nothing of what the figures are about: titles, units and tables come with them.
Rule 2: what comes from outside is text: control characters are shown as escapes, markup as it is.
"""

from __future__ import annotations

import base64
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.complaints import fail
from simplebus.config.options import option, parse_seconds

if TYPE_CHECKING:
    import ssl
    from urllib.request import OpenerDirector

    from rich.console import RenderableType
    from rich.table import Table

    from simplebus.client.access import Access

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


class Facts:
    """What is asked for, again and again."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for what is no address of an HTTP door, OSError for a certificate that
        is no good."""
        from simplebus.client.access import Access

        self._url = _checked(url if "://" in url else f"http://{url}")
        access = Access.from_environment()
        self._headers = _credentials(access)
        self._opener = _straight(access.tls() if self._url.startswith("https://") else None)
        self._before: dict[str, tuple[float, dict[str, list[Any]]]] = {}

    def ask(self) -> dict[str, Any]:
        """Raises OSError with a sentence."""
        import http.client
        import urllib.error
        import urllib.request

        asked = urllib.request.Request(f"{self._url}/facts", headers=self._headers)
        other = OSError(f"{self._url} is no HTTP door of simplebus; that is port 8222 or as told")
        try:
            with self._opener.open(asked, timeout=_PATIENCE_SECONDS) as answer:
                said = json.loads(answer.read(_ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            with error:
                raise OSError(f"{self._url} says {error.code} {plain(error.reason)}") from None
        except urllib.error.URLError as error:
            raise OSError(f"{self._url} does not answer: {error.reason}") from None
        except (http.client.HTTPException, ValueError, RecursionError):
            raise other from None
        except OSError as error:  # While the answer is read.
            raise OSError(f"{self._url} does not answer: {error}") from None
        if not isinstance(said, dict) or "facts" not in said:
            raise other
        return said

    def rates(self, table: dict[str, Any], now: float) -> dict[str, list[float | None]]:
        """How fast its figures grow, by the first cells of rows."""
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
        said = facts.ask()
    except (OSError, ValueError) as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(said, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console()
    if once or not console.is_terminal:
        console.print(shown(said, facts, time.monotonic(), rows=_ROWS_ONCE))
        return
    _watch(console, facts, said, max(0.1, interval))


def _watch(console: Any, facts: Facts, said: dict[str, Any], interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    problem = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                said, problem = facts.ask(), ""
            except OSError as error:
                problem = str(error)
            picture = shown(said, facts, time.monotonic(), rows=max(2, console.height // 8))
            if problem:
                picture.title = Text(plain(problem), style="bold red")
            live.update(picture, refresh=True)
            time.sleep(interval)


def shown(said: dict[str, Any], facts: Facts, now: float, *, rows: int) -> Any:
    """A snapshot as it is printed, with at most so many rows of each table."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    found = said["facts"]
    health = found["health"]
    word = "draining" if health["draining"] else "ready" if health["ready"] else "not ready"
    colour = {"ready": "green", "draining": "yellow", "not ready": "red"}[word]
    parts: list[RenderableType] = [_rates(said["rates"]), _tiles(found["tiles"])]
    for note in found["notes"][:rows]:
        style, sign = ("red", "▲ ") if note["is_bad"] else ("yellow", "• ")
        about = Text(f"{plain(note['about'])}: ", style="bold")
        parts.append(Text(sign, style=style) + about + plain(note["sentence"]))
    for table in found["tables"]:
        if table["rows"]:
            parts.append(_table(table, facts.rates(table, now), rows))
    subtitle = plain(found["subtitle"])
    title = Text(plain(found["title"]), style="bold") + Text(f" {subtitle} ", style="dim")
    if health["why"]:
        word = f"{word}: {plain(health['why'])}"
    return Panel(Group(*parts), title=title + Text(f"● {word}", style=colour), title_align="left")


def _rates(rates: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column()
    for name, line in rates["flows"].items():
        seen = [value or 0.0 for value in line[-_LINE_CHARACTERS:]]
        grid.add_row(plain(name), f"{figure(seen[-1] if seen else 0, 'rate')}/s", sparkline(seen))
    return grid


def sparkline(values: list[float]) -> str:
    """A line of blocks, as high as the values are."""
    most = max(values, default=0.0)
    if most <= 0:
        return _BLOCKS[1] * len(values)
    return "".join(_BLOCKS[1 + round(value / most * (len(_BLOCKS) - 2))] for value in values)


def _tiles(tiles: list[dict[str, Any]]) -> RenderableType:
    from rich.columns import Columns
    from rich.text import Text

    return Columns(
        [
            Text(figure(tile["value"], tile["unit"] or "count"), style="bold")
            + Text(f" {plain(tile['title'])}", style="dim")
            for tile in tiles
        ],
        padding=(0, 3),
    )


def _table(table: dict[str, Any], rates: dict[str, list[float | None]], rows: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    left_out = table["left_out"] + max(0, len(table["rows"]) - rows)
    made = Table(title=plain(table["title"]), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for column in table["columns"]:
        is_text = column["unit"] == "text"
        made.add_column(
            plain(column["title"]),
            justify="left" if is_text else "right",
            overflow="fold" if is_text else "ellipsis",
        )
    for row in table["rows"][:rows]:
        speeds = rates.get(_key(row), [])
        cells = []
        for at, (cell, column) in enumerate(zip(row, table["columns"], strict=True)):
            text = Text(figure(cell, column["unit"]))
            if column["is_flow"] and speeds and speeds[at]:
                unit = "bytes" if column["unit"] == "bytes" else "rate"
                text += Text(f" {figure(speeds[at], unit)}/s", style="dim")
            cells.append(text)
        made.add_row(*cells)
    if left_out:
        made.caption = f"and {left_out:,} more"
    return made


def figure(value: Any, unit: str) -> str:
    """A cell as people read it."""
    if value is None or value == "":
        return "–"
    if isinstance(value, str):
        return plain(value)
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


def plain(text: str) -> str:
    """A text without anything that a terminal would obey."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )
