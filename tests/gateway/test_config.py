"""Gateway plans: valid files, and the messages for invalid ones."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from simplebus.config.errors import ConfigError
from simplebus.gateway.config import ModulePlan, parse, read
from simplebus.gateway.mailbox import FullQueuePolicy
from simplebus.gateway.modules.timer import TimerSettings

GOOD = """
[modules.clock]
module = "timer"
settings = { every = 1 }

[modules.log]
module = "logger"
hears = ["*", "clock"]
places = 7
full = "drop_oldest"

[modules.mine]
module = "tests.gateway.sample_modules:Parsed"
hears = ["log"]

[modules.mine.settings]
n = "12"
"""


def test_plan_has_modules_in_order_and_links() -> None:
    plan = parse(tomllib.loads(GOOD))
    assert [module.name for module in plan.modules] == ["clock", "log", "mine"]
    assert plan.links == (("*", "log"), ("clock", "log"), ("log", "mine"))
    clock, log, own_module = plan.modules
    assert clock.settings == TimerSettings(every=1.0)
    assert (log.places, log.full) == (7, FullQueuePolicy.DROP_OLDEST)
    assert own_module.settings == 12
    assert parse(tomllib.loads(GOOD)) == plan
    assert parse({"modules": {}}).modules == ()


def test_setting_names_accept_hyphens() -> None:
    text = '[modules.a]\nmodule = "tail"\nsettings = { path = "x", poll-seconds = 2 }\n'
    assert parse(tomllib.loads(text)).modules[0].settings.poll_seconds == 2


def parse_single(text: str) -> str:
    return f'[modules.a]\nmodule = "timer"\nsettings = {{ every = 1 }}\n{text}\n'


@pytest.mark.parametrize(
    ("text", "line", "expected_error"),
    [
        ("[modules", None, "is not TOML"),
        ("[module.a]\n", 1, "'module' is unknown; did you mean 'modules'"),
        ("modules = 3", 1, "modules: expected tables"),
        ('[modules."*"]\nmodule = "timer"', 1, "stands for all other modules and cannot be"),
        ('[modules."a b"]\nmodule = "timer"', 1, "letters, digits, _ and -, up to 64; got 'a b'"),
        ("[modules]\na = 3", 2, "modules.a: expected a table, got 3"),
        ("[modules.a]\nhears = []", 1, "modules.a: 'module' is missing"),
        ('[modules.a]\nmodul = "timer"', 2, "modules.a: 'modul' is unknown; did you mean"),
        ('[modules.a]\nmodule = "timr"', 2, "modules.a.module: 'timr' is unknown; did you mean"),
        ('[modules.a]\nmodule = "no_such_thing:A"', 2, "'no_such_thing' cannot be imported"),
        ('[modules.a]\nmodule = "tests.gateway.sample_modules:Shoot"', 2, "did you mean 'Shout'"),
        (
            '[modules.a]\nmodule = "tests.gateway.sample_modules:EVENTS"',
            2,
            "must be a class or a func",
        ),
        (parse_single("hears = ['b']"), 4, "modules.a.hears: 'b' is unknown"),
        (parse_single("hears = ['a', 'a']"), 4, "modules.a.hears: 'a' is listed twice"),
        (parse_single("hears = 'a'"), 4, "modules.a.hears: Expected `array`, got `str`"),
        (parse_single("hears = [1]"), 4, "hears\\[0\\]: Expected `str`, got `int`"),
        (parse_single("places = 0"), 4, "modules.a.places: expected 1 or more, got 0"),
        (
            parse_single("full = 'explode'"),
            4,
            "full: Invalid enum value 'explode', expected one of block, drop_oldest, drop_newest",
        ),
        (
            '[modules.a]\nmodule = "logger"\nsettings = { level = "loud" }',
            3,
            "level: Invalid enum value 'loud', expected one of debug, info, warning, error",
        ),
        ('[modules.a]\nmodule = "timer"\n', 1, "modules.a.settings: 'every' is missing"),
        ('[modules.a]\nmodule = "timer"\nsettings = 3', 3, "Expected `object`, got `int`"),
        (
            '[modules.a]\nmodule = "timer"\n\n[modules.a.settings]\nevery = 0\n',
            5,
            "modules.a.settings.every: Expected `float` >= 0.001",
        ),
        (
            '[modules.a]\nmodule = "timer"\n[modules.a.settings]\n\nevry = 1\n',
            5,
            "modules.a.settings: 'evry' is unknown; did you mean 'every'",
        ),
        (
            '[modules.a]\nmodule = "tests.gateway.sample_modules:Parsed"\n',
            1,
            "settings: n is missing",
        ),
    ],
)
def test_mistake_names_line(
    tmp_path: Path, text: str, line: int | None, expected_error: str
) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected_error) as caught:
        read(path)
    prefix = f"{path}: " if line is None else f"{path}:{line}: "
    assert str(caught.value).startswith(prefix)


def test_reports_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "missing.toml")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not TOML"):
        read(tmp_path / "bytes")


def test_reports_failing_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "falls_over.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="'falls_over' fails when it is imported: ZeroDivision"):
        ModulePlan.of("a", "falls_over:A")


def test_checks_plans_made_in_code() -> None:
    assert ModulePlan.of("a", "timer", {"every": 2}).settings.every == 2
    with pytest.raises(ConfigError, match="stands for all other modules"):
        ModulePlan.of("*", "timer", {"every": 2})
    with pytest.raises(ConfigError, match="'evry' is unknown"):
        ModulePlan.of("a", "timer", {"evry": 2})
