"""Option names in error messages, as the user wrote them.

Messages name options as on the command line. If the value comes from the configuration file, the
option becomes its key, with file and line in front; from the environment, its variable:

    --tls-cert needs --tls-key too
    bus.toml:7: tls.cert needs tls.key too
    SIMPLEBUS_TLS_CERT needs SIMPLEBUS_TLS_KEY too
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import typer

from simplebus.config.environment import PREFIX
from simplebus.config.errors import ConfigError
from simplebus.config.toml_lines import find_line

if TYPE_CHECKING:
    from simplebus.config.file import ConfigFile

_FLAG = re.compile(r"--[a-z][a-z-]*")
_TABLES = (("nats_tls_", "nats.tls."), ("nats_", "nats."), ("tls_", "tls."))


def option_names_in(text: str) -> list[str]:
    """Return the parameter names of the options that a message names."""
    return [_name(flag) for flag in _FLAG.findall(text)]


def toml_key(name: str) -> str:
    """Return the key of an option in the configuration file, by parameter name."""
    for prefix, table in _TABLES:
        if name.startswith(prefix):
            return table + name.removeprefix(prefix).replace("_", "-")
    return f"serve.{name.replace('_', '-')}"


def environment_variable(name: str) -> str:
    """Return the environment variable of an option, by parameter name."""
    return PREFIX + name.upper()


def name_options_by_source(error: ValueError, context: typer.Context) -> ValueError:
    """Return `error` with each option named as the user wrote it.

    Returns:
        A ConfigError if an invalid value comes from the configuration file, else a ValueError.
    """
    config: ConfigFile | None = context.params.get("config")
    lines = str(error).splitlines()
    messages = [_name_options(sentence, config, context) for sentence in lines]
    is_file_error = isinstance(error, ConfigError) or any(is_of_file for _, is_of_file in messages)
    sentences = [sentence for sentence, _ in messages]
    return ConfigError(*sentences) if is_file_error else ValueError("\n".join(sentences))


def _name_options(
    sentence: str, config: ConfigFile | None, context: typer.Context
) -> tuple[str, bool]:
    """Return one message with its options renamed, and whether the file caused it."""
    sources = {name: _source(context, name) for name in option_names_in(sentence)}
    begins_with_key = config is not None and find_line(sentence, config.lines) is not None
    is_of_file = begins_with_key or "DEFAULT_MAP" in sources.values()
    default_source = "ENVIRONMENT" if "ENVIRONMENT" in sources.values() else ""

    def rename(flag: re.Match[str]) -> str:
        name = _name(flag[0])
        match sources[name] or ("DEFAULT_MAP" if is_of_file else default_source):
            case "DEFAULT_MAP":
                return toml_key(name)
            case "ENVIRONMENT":
                return environment_variable(name)
        return flag[0]

    message = _FLAG.sub(rename, sentence)
    return (
        config.add_location(message) if config is not None and is_of_file else message
    ), is_of_file


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _source(context: typer.Context, name: str) -> str:
    """Return COMMANDLINE, ENVIRONMENT, or DEFAULT_MAP for the file; empty for a default."""
    source = context.get_parameter_source(name)
    return "" if source is None or source.name == "DEFAULT" else source.name
