"""Values of all settings from the command line, the environment and the file.

The command line takes precedence over the environment, and the environment over the file.

Error messages name options as on the command line. If the value comes from the configuration file,
the option becomes its key, with file and line in front; from the environment, its variable:

    --tls-cert needs --tls-key too
    bus.toml:7: tls.cert needs tls.key too
    SIMPLEBUS_TLS_CERT needs SIMPLEBUS_TLS_KEY too
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from simplebus.config.errors import ConfigError, shorten
from simplebus.config.file import ConfigFile, read_config
from simplebus.config.parse import LogFormat
from simplebus.config.server_schema import SETTINGS, ServerConfig
from simplebus.config.setting import Setting, normalize
from simplebus.config.toml_document import TomlDocument

_FLAG = re.compile(r"--[a-z][a-z-]*")


class Source(enum.Enum):
    """Place where a setting has its value."""

    FLAG = enum.auto()
    VARIABLE = enum.auto()
    FILE = enum.auto()


@dataclass(frozen=True, slots=True)
class Configuration:
    """Values of all settings, and where they are set."""

    config: ServerConfig
    sources: Mapping[str, Source]
    """Source of each setting that does not have its default, by name."""
    flags: Mapping[str, Any]
    """Values of the command line, by name."""
    file: ConfigFile | None = None
    warnings: tuple[str, ...] = ()
    file_errors: tuple[str, ...] = ()
    variable_errors: tuple[str, ...] = ()

    @property
    def names_on_command_line(self) -> list[str]:
        """Sorted names of the settings that the command line sets."""
        return sorted(name for name, source in self.sources.items() if source is Source.FLAG)

    def raise_errors(self) -> None:
        """Raise ConfigError for errors in the file, else ValueError for those in variables."""
        if self.file_errors:
            raise ConfigError(*self.file_errors)
        if self.variable_errors:
            raise ValueError("\n".join(self.variable_errors))


def read_configuration(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    path: Path | None,
    *,
    ignored: Collection[str] = (),
) -> Configuration:
    """Read all sources.

    Args:
        flags: Values of the command line, by name or former name.
        environment: Environment variables.
        path: Configuration file; None for no file.
        ignored: Names of settings in the file to ignore.

    Returns:
        The valid values, and the errors of the others.
    """
    file, file_errors = None, tuple[str, ...]()
    if path is not None:
        try:
            file, file_errors = read_config(path)
        except ConfigError as error:
            file, file_errors = ConfigFile(TomlDocument(path)), error.messages
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    warnings, variable_errors = [*(file.warnings if file else ())], list[str]()
    for setting in SETTINGS.values():
        name = setting.name
        for spelled in (setting, *setting.former):
            text = environment.get(spelled.variable, "")
            if spelled.name in flags and sources.get(name) is not Source.FLAG:
                values[name], sources[name] = flags[spelled.name], Source.FLAG
                used, current = spelled.flag, setting.flag
            elif text and name not in values:
                sources[name] = Source.VARIABLE
                used, current = spelled.variable, setting.variable
                try:
                    values[name] = setting.parse_text(text)
                except typer.BadParameter as error:
                    variable_errors.append(f"{spelled.variable}: {shorten(error.message)}")
            else:
                continue
            if spelled is not setting:
                warnings.append(f"{used} is deprecated: use {current}")
        if file and name not in sources and name in file.options and name not in ignored:
            values[name], sources[name] = file.options[name], Source.FILE
    return Configuration(
        ServerConfig.from_values(values),
        sources,
        flags,
        file,
        tuple(warnings),
        file_errors,
        tuple(variable_errors),
    )


def old_value_warnings(configuration: Configuration) -> Iterator[str]:
    """Yield a warning for each value that has another name now."""
    if configuration.config.general.log_format is LogFormat.TEXT:
        warning = ValueError("--log-format: 'text' is deprecated: use 'console'")
        yield str(name_options_by_source(warning, configuration))


# Names in error messages --------------------------------------------------------------------------


def settings_in(text: str) -> list[Setting]:
    """Return the settings whose options a message names."""
    names = [normalize(flag.removeprefix("--")) for flag in _FLAG.findall(text)]
    return [SETTINGS[name] for name in names if name in SETTINGS]


def name_options_by_source(error: ValueError, configuration: Configuration) -> ValueError:
    """Return `error` with each option named as the user wrote it.

    Returns:
        A ConfigError if an invalid value comes from the configuration file, else a ValueError.
    """
    lines = str(error).splitlines()
    messages = [_name_options(sentence, configuration) for sentence in lines]
    is_file_error = isinstance(error, ConfigError) or any(is_of_file for _, is_of_file in messages)
    sentences = [sentence for sentence, _ in messages]
    return ConfigError(*sentences) if is_file_error else ValueError("\n".join(sentences))


def _name_options(sentence: str, configuration: Configuration) -> tuple[str, bool]:
    """Return one message with its options renamed, and whether the file caused it."""
    file = configuration.file
    sources = {
        setting.flag: configuration.sources.get(setting.name) for setting in settings_in(sentence)
    }
    begins_with_key = file is not None and file.document.find_line(sentence) is not None
    is_of_file = begins_with_key or Source.FILE in sources.values()
    default = Source.VARIABLE if Source.VARIABLE in sources.values() else Source.FLAG

    def rename(flag: re.Match[str]) -> str:
        if flag[0] not in sources:
            return flag[0]
        setting = SETTINGS[normalize(flag[0].removeprefix("--"))]
        match sources[flag[0]] or (Source.FILE if is_of_file else default):
            case Source.FILE:
                return setting.key
            case Source.VARIABLE:
                return setting.variable
        return flag[0]

    message = _FLAG.sub(rename, sentence)
    return (file.document.add_location(message) if file and is_of_file else message), is_of_file
