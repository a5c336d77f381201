"""What is wrong with options, in the words of whoever set them.

Rule 1: a sentence names options as the command line does. What the file says is called by its key
then, with the file and the line; what the environment says by its variable. What nobody says is
called as the others are.

    --tls-cert needs --tls-key too
    bus.toml:7: tls.cert needs tls.key too
    SIMPLEBUS_TLS_CERT needs SIMPLEBUS_TLS_KEY too
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import typer

from simplebus.config.environment import PREFIX
from simplebus.config.mistakes import ConfigError
from simplebus.config.toml_lines import line_of

if TYPE_CHECKING:
    from simplebus.config.file import Config

_FLAG = re.compile(r"--[a-z][a-z-]*")
_TABLES = (("nats_tls_", "nats.tls."), ("nats_", "nats."), ("tls_", "tls."))


def option_names_in(text: str) -> list[str]:
    """The options that a sentence names, by the names of their values."""
    return [_name(flag) for flag in _FLAG.findall(text)]


def toml_key(name: str) -> str:
    """How an option is called in the file, by the name of its value."""
    for prefix, table in _TABLES:
        if name.startswith(prefix):
            return table + name.removeprefix(prefix).replace("_", "-")
    return f"serve.{name.replace('_', '-')}"


def environment_variable(name: str) -> str:
    """How it is called in the environment."""
    return PREFIX + name.upper()


def name_options_by_source(error: ValueError, context: typer.Context) -> ValueError:
    """What is wrong with options, a line each, in the words of whoever set them: a ConfigError
    where the file did."""
    config: Config | None = context.params.get("config")
    said = str(error).splitlines()
    told = [_name_options(sentence, config, context) for sentence in said]
    of_file = isinstance(error, ConfigError) or any(is_of_file for _, is_of_file in told)
    sentences = [sentence for sentence, _ in told]
    return ConfigError(*sentences) if of_file else ValueError("\n".join(sentences))


def _name_options(sentence: str, config: Config | None, context: typer.Context) -> tuple[str, bool]:
    """One of them, and whether it is about the file."""
    sources = {name: _source(context, name) for name in option_names_in(sentence)}
    begins_with_key = config is not None and line_of(sentence, config.lines) is not None
    is_of_file = begins_with_key or "DEFAULT_MAP" in sources.values()
    others = "ENVIRONMENT" if "ENVIRONMENT" in sources.values() else ""

    def word(flag: re.Match[str]) -> str:
        name = _name(flag[0])
        match sources[name] or ("DEFAULT_MAP" if is_of_file else others):
            case "DEFAULT_MAP":
                return toml_key(name)
            case "ENVIRONMENT":
                return environment_variable(name)
        return flag[0]

    plain = _FLAG.sub(word, sentence)
    return (config.told(plain) if config is not None and is_of_file else plain), is_of_file


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _source(context: typer.Context, name: str) -> str:
    """Who says what an option is: COMMANDLINE, ENVIRONMENT, or DEFAULT_MAP for the file; empty for
    nobody."""
    source = context.get_parameter_source(name)
    return "" if source is None or source.name == "DEFAULT" else source.name
