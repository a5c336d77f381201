"""Declaration of a setting: type, unit, default, description and example, in one place.

A table of settings is a frozen dataclass whose fields are declared by `Kind.setting`. The name of a
field decides how users write it: `max_payload` of a table with the prefix `nats_` is the option
`--nats-max-payload`, the variable `SIMPLEBUS_NATS_MAX_PAYLOAD` and the key `nats.max-payload`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import typer

from simplebus.config.errors import suggest_name
from simplebus.config.parse import format_size, parse_port, parse_seconds, parse_size
from simplebus.core.limits import CLASS_ID_MAX

PREFIX = "SIMPLEBUS_"
"""Beginning of the environment variables of all settings."""


def normalize(name: str) -> str:
    """Return a key, or a part of an option, with `_` for `-`."""
    return name.replace("-", "_")


@dataclass(frozen=True, slots=True)
class Kind:
    """Type of a setting's value."""

    name: str
    """Name of the type in the reference page."""
    metavar: str
    """Placeholder of the value in the help."""
    parse: Callable[[Any], Any]
    """Returns the value of a text, or of a TOML value of a type in `toml_types`.

    Raises typer.BadParameter.
    """
    toml_types: tuple[type, ...] = (str,)
    unit: str = ""
    format: Callable[[Any], str] = str
    """Returns a value as users write it."""
    choices: tuple[str, ...] = ()
    table: type[SettingsTable] | None = None
    """Table that may be written instead of a single value."""
    is_secret: bool = False

    def setting(
        self,
        help_text: str,
        *,
        default: Any = MISSING,
        sets: tuple[type, str] | None = None,
        **details: Any,
    ) -> Any:
        """Declare a field of a settings table, with `details` as in `Setting`.

        Without `default`, the default is that of the field in `sets`. Without either, it is False
        for a flag, an empty tuple for a list, and otherwise None.
        """
        if default is MISSING and sets is not None:
            default = next(
                table_field.default
                for table_field in fields(sets[0])
                if table_field.name == sets[1]
            )
        elif default is MISSING:
            default = False if self is FLAG else () if details.get("is_list") else None
        declared = Setting(self, help_text, default, sets, **details)
        return field(default=default, metadata={"setting": declared})

    def parse_toml(self, value: Any) -> Any:
        """Return the value of a key in the file. Raises typer.BadParameter."""
        if not isinstance(value, self.toml_types) and (
            not self.toml_types or not isinstance(value, bool | int | float | str)
        ):
            expected = "a table" if self.table is not None else "a single value"
            raise typer.BadParameter(f"expected {expected}, got {describe_toml(value)}")
        if isinstance(value, bool) != (bool in self.toml_types):
            expected = "a value, not true or false" if isinstance(value, bool) else "true or false"
            raise typer.BadParameter(f"expected {expected}, got {describe_toml(value)}")
        if not isinstance(value, self.toml_types):
            if isinstance(value, str):
                self.parse(value)  # Another error in the text is reported first.
            expected = "a text" if str in self.toml_types else "a number"
            described_value = "a number" if self.is_secret else repr(value)
            raise typer.BadParameter(f"expected {expected}, got {described_value}")
        if self.name == "time" and isinstance(value, str) and re.fullmatch(r"[0-9.]+", value):
            raise typer.BadParameter(f"expected a number, got {value!r}")
        return self.parse(value)


def describe_toml(value: Any) -> str:
    """Return a TOML value for an error message."""
    words = {dict: "a table", list: "a list", bool: str(value).lower()}
    return words.get(type(value), repr(value))


_BOOLEANS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_BOOLEANS |= {"on": True, "off": False, "t": True, "f": False, "y": True, "n": False}


def _parse_flag(value: str | bool) -> bool:
    if isinstance(value, bool):
        return value
    if (flag := _BOOLEANS.get(value.strip().lower())) is None:
        raise typer.BadParameter(f"it should be true or false, got {value!r}")
    return flag


def _parse_count(value: str | float) -> int:
    try:
        count = int(value)
    except (ValueError, OverflowError):
        count = None
    if count is None or isinstance(value, float):
        raise typer.BadParameter(f"it should be a valid integer, got {value!r}")
    if count < 0:
        raise typer.BadParameter(f"it should be 0 or more, got {value!r}")
    return count


def _parse_class_id(value: str | float) -> int:
    if (class_id := _parse_count(value)) > CLASS_ID_MAX:
        raise typer.BadParameter(f"a class id is from 0 to {CLASS_ID_MAX}, got {value!r}")
    return class_id


def _parse_number(value: str | float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise typer.BadParameter(f"it should be a number of 0 or more, got {value!r}")
    return number


def _parse_path(value: str | Path) -> Path:
    if "\0" in str(value):
        raise typer.BadParameter(f"{value!r} is not a path: it contains a zero byte")
    return Path(value)


FLAG = Kind("boolean", "", _parse_flag, (bool,))
TEXT = Kind("text", "NAME", str)
COUNT = Kind("integer", "COUNT", _parse_count, (int, float))
RATE = Kind("number", "COUNT", _parse_number, (int, float), format="{:g}".format)
SIZE = Kind("size", "SIZE", parse_size, (int, float, str), "bytes", format_size)
SECONDS = Kind("time", "SECONDS", parse_seconds, (int, float, str), "seconds", "{:g}".format)
CLASS_ID = Kind("integer", "ID", _parse_class_id, (int, float))
PORT = Kind("integer", "PORT", parse_port, (int, float))
FILE = Kind("text", "FILE", _parse_path)


def choice(enumeration: type[enum.Enum], metavar: str) -> Kind:
    """Return the kind of a setting whose values are the lower-case names of an enumeration."""
    members = {member.name.lower(): member for member in enumeration}

    def parse(value: str | enum.Enum) -> enum.Enum:
        if isinstance(value, enumeration):
            return value
        if (member := members.get(str(value))) is None:
            names = ", ".join(map(repr, members))
            hint = suggest_name(str(value), members)
            raise typer.BadParameter(f"{value!r} is not one of {names}{hint}")
        return member

    return Kind("choice", metavar, parse, choices=tuple(members), format=lambda m: m.name.lower())


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the server."""

    kind: Kind
    help: str
    """Description, with other settings as options and `[bold]` for what users type."""
    default: Any
    sets: tuple[type, str] | None = None
    """Class of the core and its field that the setting sets."""
    default_text: str = ""
    """Default in words, if it depends on other settings or is None."""
    example: str = ""
    """Value in the sample file, if there is no default to show."""
    why_bounded: str = ""
    """Reason of the bounds that `sets` has because of another setting."""
    needs_restart: bool = False
    """True if a running server keeps the value, unlike the others of its table."""
    is_list: bool = False
    is_required: bool = False
    old_names: tuple[str, ...] = ()
    """Former field names, which still work and log a warning."""
    field_name: str = ""
    table: type[SettingsTable] | None = None

    @property
    def name(self) -> str:
        """Name that identifies the setting: the name of the option, with `_` for `-`."""
        return self.table.OPTION_PREFIX + self.field_name if self.table else self.field_name

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def toml_table(self) -> str:
        """Table in the configuration file."""
        return self.table.TOML_TABLE if self.table else ""

    @property
    def toml_key(self) -> str:
        """Key in the table."""
        return self.field_name.strip("_").replace("_", "-")

    @property
    def key(self) -> str:
        """Table and key in the configuration file."""
        return f"{self.toml_table}.{self.toml_key}"

    @property
    def is_list_of_tables(self) -> bool:
        return self.is_list and not self.kind.toml_types

    @property
    def is_reloadable(self) -> bool:
        """True if SIGHUP changes the value in a running server."""
        return self.table is not None and self.table.IS_RELOADABLE and not self.needs_restart

    @property
    def former(self) -> tuple[Setting, ...]:
        """The setting under each of its former names."""
        return tuple(replace(self, field_name=name, old_names=()) for name in self.old_names)

    def option(self, *, reads_variable: bool = False, is_hidden: bool = False) -> Any:
        """Return the typer option of a parameter of the type `option_type`.

        Args:
            reads_variable: True if the command line reads the environment variable.
            is_hidden: True to leave the option out of the help.
        """
        more: dict[str, Any] = {"envvar": self.variable} if reads_variable else {}
        if self.kind is not FLAG:
            more |= {"parser": self.kind.parse, "metavar": self.kind.metavar}
            more["show_default"] = self.default_text or self.option_default is not None
        if self.kind.choices:
            more["autocompletion"] = lambda: self.kind.choices
        return typer.Option(
            self.flag,
            help=self.help,
            rich_help_panel=self.table.PANEL if self.table else None,
            hidden=is_hidden,
            show_envvar=False,
            **more,
        )

    @property
    def option_type(self) -> Any:
        if self.kind is FLAG:
            return bool
        return list[Any] if self.is_list else Any

    @property
    def option_default(self) -> Any:
        """Default of the option: False for a flag, else a text as users write it, or None."""
        if self.kind is FLAG:
            return self.default
        return None if self.is_list or self.default is None else self.kind.format(self.default)

    def parse_text(self, text: str) -> Any:
        """Return the value of an environment variable. Raises typer.BadParameter."""
        if self.is_list:
            return tuple(map(self.kind.parse, text.split()))
        return self.kind.parse(text)

    def format_value(self, value: Any) -> Any:
        """Return a value in the form that a reload compares and logs: sizes and choices as text."""
        if (self.kind.parse is SIZE.parse or self.kind.choices) and value is not None:
            return self.kind.format(value)
        return None if value == () else value

    def format_default(self) -> str:
        """Return the default for the help and the reference page; empty without one."""
        return self.default_text or self.option_default or ""


@dataclass(frozen=True)
class SettingsTable:
    """Base of the tables of settings."""

    TOML_TABLE: ClassVar[str] = "serve"
    OPTION_PREFIX: ClassVar[str] = ""
    """Beginning of the options, which the keys in the file do not have."""
    PANEL: ClassVar[str | None] = None
    """Heading of the options in the help."""
    IS_RELOADABLE: ClassVar[bool] = False
    """True if SIGHUP changes the settings in a running server."""
    DEPRECATED: ClassVar[str] = ""
    """Replacement of the keys, if the table is deprecated."""

    @classmethod
    @cache
    def settings(cls) -> tuple[Setting, ...]:
        """Return the settings of the table."""
        return tuple(
            replace(table_field.metadata["setting"], field_name=table_field.name, table=cls)
            for table_field in fields(cls)
        )
