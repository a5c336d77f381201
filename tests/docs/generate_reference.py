"""Generator of the reference pages on commands, configuration, metrics and log events.

`python -m tests.docs.generate_reference` writes the pages. Everything that a program knows comes
from the code: options, defaults, types, metrics. Meanings of keys without an option are in
`table_meanings`.
"""

from __future__ import annotations

import enum
import re
import textwrap
import types
import typing
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin
from unittest.mock import MagicMock

import msgspec
import trio
import typer

from simplebus.bridge.copier import CopierStatistics
from simplebus.bridge.metrics import bridge_snapshot
from simplebus.cli import app
from simplebus.config.server_schema import SETTINGS, ClassTable
from simplebus.config.setting import PREFIX, Setting, SettingsTable, normalize
from simplebus.core.errors import Reason
from simplebus.core.protocol.durability import Durability
from simplebus.gateway.gateway import GatewayStatistics
from simplebus.gateway.metrics import gateway_snapshot
from simplebus.gateway.supervisor import LifeStatistics, State
from simplebus.monitor.bus_facts import BusFacts, ClassFacts
from simplebus.monitor.bus_metrics import add_bus_metrics
from simplebus.monitor.exposition import metric_full_name
from simplebus.monitor.metrics_builder import MetricsBuilder
from simplebus.monitor.snapshot import Metric, MetricKind
from simplebus.server.http.facts import FactsCollector
from simplebus.server.http.server_monitor import ServerMonitor
from tests.docs import log_events
from tests.docs.table_meanings import TABLES

REFERENCE = Path(__file__).parents[2] / "protocol" / "reference"
GENERATED_NOTE = (
    "<!-- Written by `python -m tests.docs.generate_reference`; change the code instead. -->"
)
_FLAG = re.compile(r"--[a-z][a-z-]*[a-z]")

# Markdown ----------------------------------------------------------------------------------------


def format_text(text: str) -> str:
    """Return the Markdown of a help text: options as code, special characters escaped."""
    text = re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", " ".join(text.split())).replace("\\[", "[")
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        escaped = re.sub(r"([*<\[|])", r"\\\1", parts[index])
        linked = re.sub(r"protocol/([\w/-]+\.md)", r"[protocol/\1](../\1)", escaped)
        parts[index] = _FLAG.sub(lambda flag: f"`{flag[0]}`", linked)
    return "`".join(parts)


def format_paragraph(text: str) -> list[str]:
    """Return the lines of a paragraph of Markdown."""
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    if text.startswith("- "):
        options["subsequent_indent"] = "  "
    return textwrap.wrap(text, 120, **options)


def join_alternatives(words: Sequence[str]) -> str:
    """Return "a, b or c"."""
    *most, last = dict.fromkeys(words)
    return f"{', '.join(most)} or {last}" if most else last


def format_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, without columns that are empty in every row."""
    rows = list(rows)
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cells[i]) for i in used) + " |"

    return [line(columns), "|" + "---|" * len(used), *map(line, rows), ""]


def _code(text: object) -> str:
    return f"`{text}`"


# Commands ----------------------------------------------------------------------------------------

CLIENT_OPTIONS = ("user", "credentials", "tls_ca", "tls_cert", "tls_key")
SPARK_OPTIONS = ("master", "settings")
_SHARED = {
    CLIENT_OPTIONS: "[options of clients](#options-of-clients)",
    SPARK_OPTIONS: "[options of Spark](#options-of-spark)",
}
_INSTALL = ("install_completion", "show_completion")
_PANELS = ("Use it", "Look after it", "Join it to others", "Set it up")


def subcommands(command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group, by name."""
    if hasattr(command, "list_commands"):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield name, command.get_command(context, name)


def all_commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name, such as `simplebus dlq ls`."""

    def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield path, command
        for name, each in subcommands(command):
            yield from walk(f"{path} {name}", each)

    return walk("simplebus", typer.main.get_command(app))


def _help_lines(help_text: str) -> Iterator[str]:
    """Yield the Markdown of a command's help; paragraphs that begin with BEL are examples."""
    examples: list[str] = []
    for paragraph in [*help_text.split("\n\n"), ""]:
        if paragraph.startswith("\b"):
            examples += [""] * bool(examples) + paragraph.removeprefix("\b\n").split("\n")
            continue
        if examples:
            code = [line.removeprefix("  ").replace("\\[", "[") for line in examples]
            yield from ("```text", *code, "```", "")
            examples = []
        if paragraph:
            yield from (*format_paragraph(format_text(paragraph)), "")


def _is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def _parameter_name(parameter: Any) -> str:
    """Return an option with its value, or an argument."""
    if _is_argument(parameter):
        return parameter.metavar or parameter.name.upper()
    if getattr(parameter, "is_flag", False):
        return " ".join(parameter.opts)
    kind = parameter.type_descriptor.annotation
    values = [str(each.value) for each in kind] if _is_enum(kind) else []
    metavar = parameter.metavar or "|".join(values) or "COUNT"
    return f"{parameter.opts[0]} {metavar}"


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _default(parameter: Any) -> str:
    """Return the default as the help shows it; empty without one."""
    default = parameter.show_default
    if not isinstance(default, str):
        if parameter.default is None or not default or getattr(parameter, "is_flag", False):
            return ""
        default = parameter.default
        default = str(default.value if isinstance(default, enum.Enum) else default)
    is_value = " " not in default
    return _code(default.removesuffix(".0")) if is_value else default


def _usage(path: str, command: Any) -> str:
    words = [path, "[OPTIONS]"]
    if hasattr(command, "list_commands"):
        return " ".join([path, "COMMAND"])
    for parameter in filter(_is_argument, command.params):
        name = _parameter_name(parameter)
        name = name if parameter.required or name.startswith("[") else f"[{name}]"
        words.append(f"{name}..." if parameter.nargs == -1 and "..." not in name else name)
    return " ".join(words)


def _parameter_rows(parameters: Iterable[Any], *, has_variables: bool = True) -> list[list[str]]:
    return [
        [
            _code(_parameter_name(parameter)),
            format_text(_default(parameter)),
            _code(parameter.envvar) if has_variables and parameter.envvar else "",
            format_text(parameter.help or ""),
        ]
        for parameter in parameters
    ]


_PARAMETER_COLUMNS = ("option", "default", "variable", "meaning")


def _command_lines(path: str, command: Any, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {path}", "")
    yield from ("```text", _usage(path, command), "```", "")
    yield from _help_lines(command.help)
    names = {param.name for param in command.params}
    if path == "simplebus serve":
        yield from _serve_lines(command)
    else:
        shared = [options for options in _SHARED if names.issuperset(options)]
        own_parameters = [
            param for param in command.params if not any(param.name in s for s in shared)
        ]
        if own_parameters:
            yield from format_table(_PARAMETER_COLUMNS, _parameter_rows(own_parameters))
        if shared:
            also = " and ".join(_SHARED[options] for options in shared)
            yield from (f"The {also} apply, too.", "")
    for name, each in subcommands(command):
        yield from _command_lines(f"{path} {name}", each, level + 1)


def _panels(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for parameter in parameters:
        panels.setdefault(parameter.rich_help_panel or "General", []).append(parameter)
    return panels


def _serve_lines(command: Any) -> Iterator[str]:
    yield from format_paragraph(
        "[Configuration](configuration.md) has the same settings as keys of a file, with types and "
        f"units. The variable of an option is its name in capitals after `{PREFIX}`, with `_` for "
        "`-`; several values of a repeated option are separated by spaces."
    )
    yield ""
    for panel, parameters in _panels(command.params).items():
        yield from (f"#### serve: {panel}", "")
        yield from format_table(
            _PARAMETER_COLUMNS, _parameter_rows(parameters, has_variables=False)
        )


_COMMANDS_INTRODUCTION = """\
# Commands

{note}

Every command of `simplebus`, with its arguments and options, their defaults, and the environment
variables that set them. Every command has `--help`, which prints the same.

An option on the command line overrides its variable, and a variable overrides the configuration
file. Errors are one sentence on standard error; [errors](errors.md#exit-statuses) lists the exit
statuses. `simplebus --install-completion` installs completion of commands, options and values for
bash, zsh and fish.
"""


def render_commands() -> str:
    """Return the page of all commands."""
    root = typer.main.get_command(app)
    commands = dict(subcommands(root))
    by_name = {name: {param.name: param for param in c.params} for name, c in all_commands()}
    lines = [
        *_COMMANDS_INTRODUCTION.format(note=GENERATED_NOTE).split("\n"),
        "## simplebus",
        "",
        *format_table(
            _PARAMETER_COLUMNS,
            [
                [_code(each.opts[0]), "", "", format_text(each.help)]
                for each in by_name["simplebus"].values()
            ],
        ),
        "## Options of clients",
        "",
        *format_table(
            _PARAMETER_COLUMNS,
            _parameter_rows(by_name["simplebus pub"][name] for name in CLIENT_OPTIONS),
        ),
        "## Options of Spark",
        "",
        *format_table(
            _PARAMETER_COLUMNS,
            _parameter_rows(by_name["simplebus pipeline archive"][name] for name in SPARK_OPTIONS),
        ),
    ]
    for panel in _PANELS:
        lines += [f"## {panel}", ""]
        for name, command in commands.items():
            if command.rich_help_panel == panel:
                lines += _command_lines(f"simplebus {name}", command, 3)
    return "\n".join(lines).rstrip() + "\n"


# Configuration -----------------------------------------------------------------------------------

_COLUMNS = ("key", "type", "default", "unit", "SIGHUP", "meaning")
_TABLE_COLUMNS = ("key", "type", "default", "unit", "meaning")
_SECTIONS = ("serve", "tls", "nats", "nats.tls")


def _option_keys(text: str) -> str:
    """Return a help text with the keys of the file instead of options."""

    def key(flag: re.Match[str]) -> str:
        setting = SETTINGS[normalize(flag[0].removeprefix("--"))]
        return _code(setting.key.removeprefix("serve."))

    return _FLAG.sub(key, text)


def _setting_type(setting: Setting) -> str:
    if setting.kind.choices:
        return join_alternatives([_code(name) for name in setting.kind.choices])
    if not setting.is_list or setting.is_list_of_tables:
        return setting.kind.name
    return "list or table" if setting.kind.table else "list"


def _setting_default(setting: Setting) -> str:
    if setting.is_required:
        return "required"
    if isinstance(setting.default, bool):
        return _code(str(setting.default).lower())
    if isinstance(setting.default, SettingsTable):
        return "none"
    text = setting.format_default()
    return _option_keys(text if " " in text else _code(text)) if text else "none"


def _setting_rows(settings: Iterable[Setting]) -> list[list[str]]:
    rows = []
    for setting in settings:
        meaning = re.sub(r" Repeat the option for more \w+\.", "", setting.help)
        rows.append(
            [
                _code(setting.toml_key),
                _setting_type(setting),
                _setting_default(setting),
                setting.kind.unit,
                "applies" if setting.is_reloadable else "restart",
                format_text(_option_keys(meaning)),
            ]
        )
    return rows


def _bounds(minimum: Any, maximum: Any) -> str:
    if maximum is not None:
        return f", {minimum or 0:,} to {maximum:,}"
    return f", at least {minimum:,}" if minimum else ""


def _type_name(kind: Any) -> str:
    """Return the TOML type of an annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return join_alternatives(
            [_type_name(argument) for argument in arguments if argument is not type(None)]
        )
    if origin is typing.Annotated:
        meta = arguments[1]
        minimum = meta.ge if meta.ge is not None else None
        return _type_name(arguments[0]) + _bounds(minimum, meta.le)
    if origin is typing.Literal:
        return join_alternatives([_code(argument) for argument in arguments])
    if _is_enum(kind):
        return join_alternatives([_code(each.value) for each in kind])
    if origin in (list, tuple):
        inner = arguments[0]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            return "tables"
        return "list of pairs" if get_origin(inner) is tuple else "list"
    if origin is dict or (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return "table"
    return {int: "integer", float: "number", bool: "boolean"}.get(kind, "text")


def _field_default(field: Any) -> str:
    if field.required:
        return "required"
    default = field.default
    if default is msgspec.NODEFAULT:
        default = field.default_factory()
    if isinstance(default, bool):
        return _code(str(default).lower())
    if isinstance(default, enum.Enum):
        return _code(default.value)
    if default in (None, "", [], {}, ()) or isinstance(default, msgspec.Struct):
        return "none"
    return _code(f"{default:g}" if isinstance(default, float) else default)


def table_keys(table: type[msgspec.Struct | SettingsTable]) -> list[str]:
    """Return the keys of a table whose meanings are listed."""
    if issubclass(table, SettingsTable):
        return []
    return [field.encode_name for field in msgspec.structs.fields(table)]


def parse_meanings(text: str) -> dict[str, tuple[str, str]]:
    """Return unit and meaning by key, from lines "key | unit | meaning"."""
    rows = [[cell.strip() for cell in line.split(" | ")] for line in text.strip().splitlines()]
    return {row[0]: (row[1], row[2]) for row in rows if row != [""]}


def _table_rows(
    table: type[msgspec.Struct | SettingsTable], meanings: str, hyphen: str
) -> list[list[str]]:
    if issubclass(table, SettingsTable):
        return [[*row[:4], row[5]] for row in _setting_rows(table.settings())]
    by_key, rows = parse_meanings(meanings), []
    for field in msgspec.structs.fields(table):
        unit, meaning = by_key[field.encode_name]
        kind = _type_name(field.type)
        if unit.startswith("bytes") and kind == "integer or text":
            kind = "size"
        key = _code(field.encode_name.replace("_", hyphen))
        rows.append([key, kind, _field_default(field), unit.strip("-"), meaning])
    return rows


_CONFIGURATION_INTRODUCTION = """\
# Configuration

{note}

Every setting of the file of `simplebus serve --config FILE`, and of the files of `simplebus bridge`
and `simplebus gateway`. `simplebus config sample` prints a file with every setting, and
`simplebus check-config FILE` reports all errors of a file by line.

- A **size** is a number of bytes, or a text such as `"64MiB"`, with KiB, MiB or GiB.
- A **time** is a number of seconds, or a text such as `"500ms"`, `"5min"`, `"2h"` or `"7d"`.
- In keys, `-` and `_` mean the same.
- Each key of `[serve]`, `[tls]`, `[nats]` and `[nats.tls]` has an option of
  [serve](commands.md#simplebus-serve) and an environment variable. `cert` of `[nats.tls]` is
  `--nats-tls-cert` and `SIMPLEBUS_NATS_TLS_CERT`. Options override variables, and variables
  override the file.
- A relative path counts from the directory of the file; a path of an option or a variable counts
  from the working directory.
- SIGHUP reads the file again. The column SIGHUP tells whether a changed setting applies at once or
  needs a restart. Settings of classes and users apply, those of bridges need a restart. For each
  changed setting the log states the new value, or that it needs a restart. A file with an error
  changes nothing.
"""


_CLASSES_INTRODUCTION = (
    "Settings of one class. A key that is left out has the value of all classes, from `[serve]`."
)


def render_configuration() -> str:
    """Return the page of all settings."""
    lines = _CONFIGURATION_INTRODUCTION.format(note=GENERATED_NOTE).split("\n")
    for section in _SECTIONS:
        lines += [f"## The table [{section}]", ""]
        panels: dict[str, list[Setting]] = {}
        for setting in SETTINGS.values():
            if setting.toml_table == section and setting.table is not None:
                panels.setdefault(setting.table.PANEL or "General", []).append(setting)
        for panel, members in panels.items():
            lines += [f"### serve: {panel}", ""] if section == "serve" else []
            lines += format_table(_COLUMNS, _setting_rows(members))
    lines += ["## The tables [classes.NAME]", "", *format_paragraph(_CLASSES_INTRODUCTION), ""]
    lines += format_table(_COLUMNS, _setting_rows(ClassTable.settings()))
    for section, tables in TABLES.items():
        lines += [f"## {section}", ""]
        for heading, introduction, table, meanings, hyphen in tables:
            lines += [f"### {heading}", ""]
            lines += [*format_paragraph(introduction), ""] if introduction else []
            lines += format_table(_TABLE_COLUMNS, _table_rows(table, meanings, hyphen))
    return "\n".join(lines).rstrip() + "\n"


# Metrics -----------------------------------------------------------------------------------------


def count_nothing() -> Generator[None, None, MagicMock]:
    """Return the statistics of a NATS listener, in steps."""
    yield
    return MagicMock()


def server_metrics() -> list[Metric]:
    """Return the metrics of a server with a journal, NATS clients and a JetStream cluster."""
    server = MagicMock()
    server.broker.store.classes = {}
    server.broker.refusal_counts = server.disconnect_counts = {Reason.BAD_ACK: 1}
    server.journal_pump.statistics.return_value.level = Durability.DISK
    listener = MagicMock()
    listener.nats_server.statistics_in_steps = count_nothing
    monitor = ServerMonitor(FactsCollector(server, listener))
    monitor.collector.watchdog = MagicMock()

    async def collect() -> list[Metric]:  # Needs trio's clock.
        steps = monitor.take_snapshot(False)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                return list(stop.value.metrics)

    return trio.run(collect)


def metrics_of_classes() -> list[Metric]:
    """Return the metrics of all classes together, and of each one."""
    builder = MetricsBuilder()
    facts = ClassFacts("orders", 7, dropped={Reason.EXPIRED: 1})
    for _ in add_bus_metrics(builder, BusFacts([facts], None, facts, dead_letters=0)):
        pass
    return builder.build()


def bridge_metrics() -> list[Metric]:
    """Return the metrics of a bridge."""
    values = {
        name: {"looped": 1} if name == "skipped" else 1
        for name in CopierStatistics.__dataclass_fields__
    }
    copier = MagicMock()
    copier.statistics.return_value = CopierStatistics(**{**values, "name": "hq"})
    return list(bridge_snapshot([copier]).metrics)


def gateway_metrics() -> list[Metric]:
    """Return the metrics of a gateway."""
    module = LifeStatistics("clock", "timer", State.RUNNING, 0, "", 0, 0, 0, 0, {"stored": 1})
    gateway = MagicMock()
    gateway.statistics.return_value = GatewayStatistics((module,), (), 0, 0, 0)
    return list(gateway_snapshot(gateway).metrics)


def all_metrics() -> dict[str, list[Metric]]:
    """Return all metrics by the section of the page."""
    of_classes = metrics_of_classes()
    bus_metric_names = {metric.name for metric in of_classes}
    remaining = [
        server_metric
        for server_metric in server_metrics()
        if server_metric.name not in bus_metric_names
    ]

    def pick(*prefixes: str) -> list[Metric]:
        picked = [each for each in remaining if each.name.startswith(prefixes)]
        remaining[:] = [each for each in remaining if each not in picked]
        return picked

    groups = {
        "Classes, one by one": [
            metric
            for metric in of_classes
            if metric.values[0][0][:1] and not metric.name.startswith("bus_")
        ],
        "All classes together": [metric for metric in of_classes if metric.name.startswith("bus_")],
        "NATS clients": pick("nats_"),
        "Journal": pick("journal_"),
        "JetStream cluster of a stateless server": pick("engine_"),
        "Process": pick("process_"),
    }
    return {
        "Server": remaining,
        **groups,
        "Bridges": bridge_metrics(),
        "Gateways": gateway_metrics(),
    }


def series_name(metric: Metric) -> str:
    """Return the name of a metric in `/metrics`."""
    suffix = "_total" if metric.kind is MetricKind.COUNTER else ""
    return metric_full_name(metric) + suffix


_METRIC_NOTES = {
    "Classes, one by one": "The hundred classes with the most traffic have these series. The "
    'others are one sum, as gauges with `class="(others)"` and an empty `class_id`.',
    "NATS clients": "Without `--no-nats`.",
    "Journal": "With `--data-dir`; without, `simplebus_journal_failing` is 0.",
    "JetStream cluster of a stateless server": "With `--engine`.",
    "Bridges": "Of `simplebus bridge --http`, and of a server that runs bridges.",
    "Gateways": "Of `simplebus gateway --http`. If a module has a method `health`, its numbers are "
    "`simplebus_gateway_module_value`.",
}

_METRICS_INTRODUCTION = """\
# Metrics

{note}

Every series of `http://127.0.0.1:8222/metrics`, in the Prometheus text format or OpenMetrics. The
[operating guide](../guide/operating.md) shows how to scrape them, and which user may.

A **counter** only grows while the server runs. A **gauge** is a present value. A **histogram** has
the series `…_bucket`, `…_sum` and `…_count`. Latencies are sampled: one message of a class at a
time, a hundred samples a second. [Terms](../glossary.md) are those of the glossary.

## What to watch

| condition | expression |
|---|---|
| a subscriber falls behind | `simplebus_lag_messages > 100000` |
| publishers wait for space | `simplebus_blocked_publishers > 0` |
| messages fail for good | `delta(simplebus_dead_letters[10m]) > 0` |
| messages are dropped | `rate(simplebus_bus_dropped_messages_total[5m]) > 0` |
| memory runs out | `simplebus_memory_bytes / simplebus_memory_limit_bytes > 0.9` |
| the disk is full or fails | `simplebus_journal_failing > 0` |
| the event loop blocks | `increase(simplebus_event_loop_stalls_total[10m]) > 0` |
| a bridge is down | `simplebus_bridge_up < 1` |
| the JetStream cluster is away | `simplebus_engine_up < 1` |

## Labels

| label | meaning |
|---|---|
| `class` | Name of the class, or its id if it has none. |
| `class_id` | Id of the class. |
| `reason` | [Reason code](errors.md#reason-codes); of a bridge: why a message is not copied. \
Every possible reason is present from the start, as 0. |
| `listener` | Listener: `tcp` (binary), `nats` or `http`. |
| `copier` | Copier of a bridge. |
| `module` | Module of a gateway. |
| `what` | Name of a value from a module's health. |
| `version` | Version of the server. |

"""


def render_metrics() -> str:
    """Return the page of all metrics."""
    lines = _METRICS_INTRODUCTION.format(note=GENERATED_NOTE).split("\n")[:-1]
    for section, metrics in all_metrics().items():
        lines += [f"## {section}", ""]
        if note := _METRIC_NOTES.get(section):
            lines += [*format_paragraph(note), ""]
        lines += format_table(
            ("series", "type", "labels", "meaning"),
            [
                [
                    _code(series_name(metric)),
                    metric.kind.value,
                    ", ".join(_code(name) for name, _ in metric.values[0][0]),
                    format_text(metric.help),
                ]
                for metric in metrics
            ],
        )
    return "\n".join(lines).rstrip() + "\n"


# Log events --------------------------------------------------------------------------------------

_LOG_EVENTS_INTRODUCTION = """\
# Log events

{note}

Every event that simplebus logs, with its level, its fields and its sentence. The [operating
guide](../guide/operating.md#logs-and-traces) shows a JSON line and queries. A name is a subject and
an occurrence. Names and fields are stable; the sentence may change.

Four general events come first:

| event | fields | meaning |
|---|---|---|
| `events.suppressed` | `suppressed_event`, `count` | Events of this name exceeded the rate limit. |
| `lines.dropped` | `count` | Lines were dropped, because the log was not read in time. |
| `rates.measured` | `received`, `sent`, `nats_received`, … | Rates of `--verbose`, as JSON. |
| `message.logged` |  | Message of another library, or of your own module of a gateway. |

"""


def render_log_events() -> str:
    """Return the page of all log events."""
    lines = _LOG_EVENTS_INTRODUCTION.format(note=GENERATED_NOTE).split("\n")[:-1]
    lines += ["## Fields", ""]
    lines += format_table(
        ("field", "meaning"),
        [[_code(name), text] for name, text in log_events.FIELD_MEANINGS.items()],
    )
    calls = {event_call.event: event_call for event_call in log_events.find_event_calls()}
    for section in log_events.SECTIONS:
        lines += [f"## {section}", ""]
        lines += format_table(
            ("event", "level", "fields", "sentence"),
            [
                [
                    _code(event),
                    call.level or "by its cause",
                    ", ".join(map(_code, call.fields)),
                    _code(call.sentence.replace("|", "\\|")),
                ]
                for event, call in sorted(calls.items())
                if log_events.find_section(call.path) == section
            ],
        )
    return "\n".join(lines).rstrip() + "\n"


GENERATED_PAGES: dict[str, Callable[[], str]] = {
    "commands.md": render_commands,
    "configuration.md": render_configuration,
    "metrics.md": render_metrics,
    "log-events.md": render_log_events,
}
"""Function that returns the text of each generated page."""


def main() -> None:
    """Write the pages."""
    for name, render in GENERATED_PAGES.items():
        (REFERENCE / name).write_text(render())


if __name__ == "__main__":
    main()
