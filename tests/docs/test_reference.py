"""The reference pages are up to date, and nothing is missing in them."""

from __future__ import annotations

import inspect
import re
import urllib.request
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import simplebus
import simplebus.gateway
import simplebus.otel
import simplebus.spark
import simplebus.testing
from simplebus.bridge import metrics as bridge_metrics
from simplebus.config import sample
from simplebus.config.server_schema import SETTINGS
from simplebus.config.setting import SettingsTable
from simplebus.console import errors as statuses
from simplebus.core.errors import (
    DEAD_LETTER_REASONS,
    DISCONNECT_REASONS,
    DROP_REASONS,
    IGNORED_REASONS,
    REFUSAL_REASONS,
    BusError,
    Reason,
)
from simplebus.gateway import metrics as gateway_metrics
from simplebus.monitor import bus_metrics
from simplebus.server import process
from simplebus.server.http import server_metrics
from tests.docs import generate_reference as generator
from tests.docs.page_runner import PageRunner
from tests.docs.table_meanings import TABLES
from tests.support.programs import run_server
from tests.support.sources import SOURCES_GROUP

RUN_COMMAND = "python -m tests.docs.generate_reference"
METRIC_MODULES = (bridge_metrics, gateway_metrics, bus_metrics, process, server_metrics)


def page(name: str) -> str:
    return (generator.REFERENCE / name).read_text()


def missing_rows(text: str, names: Iterable[str]) -> list[str]:
    """Return the names without a row in a table of the page."""
    rows = set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE))
    return [name for name in names if name not in rows]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=SOURCES_GROUP if name == "log-events.md" else ())
        for name in generator.GENERATED_PAGES
    ],
)
def test_generated_page_is_up_to_date(name: str) -> None:
    assert page(name) == generator.GENERATED_PAGES[name](), f"run {RUN_COMMAND}"


@pytest.mark.parametrize("name", ["errors.md", "python-api.md"])
def test_examples_run(name: str, tmp_path: Path) -> None:
    PageRunner(page(name), tmp_path).run()


def test_every_command_and_option_has_an_entry() -> None:
    text = page("commands.md")
    for path, command in generator.all_commands():
        assert re.search(rf"^#+ {path}$", text, re.MULTILINE), path
        for parameter in command.params:
            option = parameter.opts[0]
            assert not option.startswith("--") or f"`{option}" in text, (path, option)


def test_every_setting_of_the_sample_has_a_row() -> None:
    sample_text = sample.render_sample()
    keys = re.findall(r"^#-? ([a-z][a-z-]*) = ", sample_text, re.MULTILINE)
    assert len(keys) > 80
    assert not missing_rows(page("configuration.md"), keys)


def test_meanings_are_those_of_existing_keys() -> None:
    """The generator fails for a key without a meaning; this finds meanings without a key."""
    for section in TABLES.values():
        for _, _, table, meanings, _ in section:
            assert list(generator.parse_meanings(meanings)) == generator.table_keys(table)


def test_every_table_of_the_files_is_on_the_page() -> None:
    tables = {table for section in TABLES.values() for _, _, table, _, _ in section}
    for table in tables:
        if issubclass(table, SettingsTable):
            nested = {setting.kind.table for setting in table.settings() if setting.kind.table}
            assert tables.issuperset(nested), table
            continue
        for field in msgspec.structs.fields(table):
            assert tables.issuperset(nested_tables(field.type)), field.name


def nested_tables(annotation: Any) -> list[type[msgspec.Struct]]:
    """Return the tables that a key may contain."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [table for part in get_args(annotation) for table in nested_tables(part)]


def test_every_metric_name_in_the_code_has_a_row() -> None:
    names = {
        generator.metric_full_name(metric)
        for metrics in generator.all_metrics().values()
        for metric in metrics
    }
    pattern = r'"((?:nats|engine|journal|bridge|gateway|process|event_loop)_[a-z_]+)"'
    for module in METRIC_MODULES:
        for name in re.findall(pattern, inspect.getsource(module)):
            assert {name, f"simplebus_{name}"} & names, name


def test_every_metric_of_a_server_has_a_row(tmp_path: Path) -> None:
    with run_server("--data-dir", str(tmp_path), "--http-port", "0") as (program, url):
        with simplebus.connect_blocking(url) as bus:
            bus.publish(b"7 books", class_id="orders")
        with urllib.request.urlopen(f"http://{program.http_address}/metrics") as response:
            text = response.read().decode()
    series = re.findall(r"^# TYPE (\w+) (?:counter|gauge|histogram)$", text, re.MULTILINE)
    assert len(series) > 40
    assert not missing_rows(page("metrics.md"), [s for s in series if not s.endswith("_created")])


def test_every_reason_code_has_a_row() -> None:
    assert not missing_rows(page("errors.md"), [reason.value for reason in Reason])


@pytest.mark.parametrize(
    ("heading", "reasons"),
    [
        ("Refused requests and messages", REFUSAL_REASONS),
        ("Ended connections", DISCONNECT_REASONS),
        (
            "Dropped messages",
            set(DROP_REASONS) - {Reason.UNAUTHORIZED, Reason.DISK_FULL, Reason.DISK_FAILED},
        ),
        ("Dead letters", DEAD_LETTER_REASONS),
        ("Ignored acks and duplicates", IGNORED_REASONS),
    ],
)
def test_tables_of_reason_codes_are_those_of_the_metrics(
    heading: str, reasons: Collection[Reason]
) -> None:
    table = page("errors.md").split(f"### {heading}\n")[1].split("\n#")[0]
    assert set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)) == set(reasons)


def test_limits_of_long_frames_are_options_of_serve() -> None:
    rows = re.findall(r"^\| `frame_too_long` .*$", page("errors.md"), re.MULTILINE)
    options = {option for row in rows for option in re.findall(r"`(--[a-z-]+)`", row)}
    assert options == {"--max-frame", "--nats-max-payload", "--nats-max-control-line"}
    assert options <= {setting.flag for setting in SETTINGS.values()}


def test_every_exception_has_a_row() -> None:
    names = {
        name
        for module in (simplebus, simplebus.gateway)
        for name in module.__all__
        if inspect.isclass(value := getattr(module, name)) and issubclass(value, BusError)
    }
    assert not missing_rows(page("errors.md"), names)


def test_every_exit_status_has_a_row() -> None:
    numbers = {value for name, value in vars(statuses).items() if name.endswith("_STATUS")}
    text = page("errors.md").split("## Exit statuses", 1)[1]
    assert numbers.issubset(map(int, re.findall(r"^\| (\d+) \|", text, re.MULTILINE)))


@pytest.mark.parametrize(
    "module", [simplebus, simplebus.testing, simplebus.gateway, simplebus.otel, simplebus.spark]
)
def test_every_public_name_is_in_the_index(module: object) -> None:
    name = module.__name__  # type: ignore[attr-defined]
    sections = re.findall(
        rf"^## {re.escape(name)}(?::[^\n]*)?\n(.*?)(?=^## |\Z)",
        page("python-api.md"),
        re.MULTILINE | re.DOTALL,
    )
    assert not missing_rows("".join(sections), module.__all__)  # type: ignore[attr-defined]


def test_names_of_the_index_exist() -> None:
    for class_name, member in re.findall(
        r"^\| `(\w+)\.(\w+)`", page("python-api.md"), re.MULTILINE
    ):
        assert hasattr(getattr(simplebus, class_name), member), f"{class_name}.{member}"
