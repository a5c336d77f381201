"""Errors of a configuration file, and of the files that it names, without starting a server."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from simplebus.commands.serve.jetstream_options import engine_options
from simplebus.commands.serve.listener_options import configured_users, http_port, nats_options
from simplebus.commands.serve.tls_options import (
    certificate_user_warnings,
    tls_options,
    tls_warnings,
)
from simplebus.config import nats_users
from simplebus.config.configuration import (
    Configuration,
    Source,
    name_options_by_source,
    old_value_warnings,
    read_configuration,
    settings_in,
)
from simplebus.config.errors import MESSAGES_MAX
from simplebus.config.parse import HOSTS
from simplebus.config.server_schema import ServerConfig
from simplebus.config.server_settings import server_settings
from simplebus.config.setting import PREFIX, normalize
from simplebus.config.users import ConfiguredUsers
from simplebus.console.errors import describe_error
from simplebus.server.tls.certificates import check_readable, create_ssl_context
from simplebus.storage.directory import check_directory
from simplebus.storage.errors import JournalError


def find_errors(path: Path, flags: Mapping[str, Any]) -> list[str]:
    """Return all errors in a configuration file, in the order of lines, and in variables.

    Args:
        path: The file.
        flags: Values of the command line, by name.
    """
    return check_file(str(path), flags)[1]


def check_file(
    file: str, flags: Mapping[str, Any] | None = None
) -> tuple[tuple[str, ...], list[str]]:
    """Return the warnings, and all errors in the file and the environment variables.

    Options that contradict others are ignored, and the rest is checked again.
    """
    errors: dict[str, None] = {}
    ignored: list[str] = []
    while True:
        configuration = read_configuration(flags or {}, os.environ, Path(file), ignored=ignored)
        conflicts, warnings = _find_conflicts(configuration)
        errors |= dict.fromkeys(conflicts)
        conflicting = [
            name
            for names in conflicts.values()
            for name in names
            if configuration.sources.get(name) is Source.FILE
        ]
        if not conflicting or len(errors) >= MESSAGES_MAX:
            break
        ignored.append(conflicting[0])
    messages = (*configuration.file_errors, *configuration.variable_errors, *errors)
    return (
        (*configuration.warnings, *warnings),
        sorted(dict.fromkeys(messages), key=partial(_line, file)),
    )


def _line(file: str, mistake: str) -> int:
    """Return the line of an error for sorting; errors without a line come last."""
    match = re.match(re.escape(file) + r":(\d+): ", mistake)
    return int(match[1]) if match else sys.maxsize


def _find_conflicts(configuration: Configuration) -> tuple[dict[str, list[str]], list[str]]:
    """Find contradictions between valid values, and unusable files that the values name.

    Returns:
        The names of the settings that each error message names, and the warnings.
    """
    errors: dict[str, list[str]] = {}
    config, file = configuration.config, configuration.file
    assert file is not None
    path = file.document.path

    def attempt(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except OSError as error:
            note_file(error)
        except ValueError as error:
            note(error, [setting.name for setting in settings_in(str(error))])
        return None

    def note_file(error: OSError) -> None:
        note(ValueError(_with_option(describe_error(error), config)), [])

    def note(error: ValueError, options: list[str]) -> None:
        for message in str(name_options_by_source(error, configuration)).splitlines():
            is_told = message.startswith((f"{path}:", f"{path} ", PREFIX))
            errors[message if is_told else file.document.add_location(message)] = options

    settings = attempt(lambda: server_settings(config, file.class_settings))
    nats = attempt(lambda: nats_options(configuration, os.environ))
    http = attempt(lambda: http_port(configuration))
    hosts = config.general.host or HOSTS
    attempt(
        lambda: _check_ports(
            configuration,
            ("--port", config.general.port, hosts),
            ("--nats-port", nats.port if nats else None, hosts),
            ("--http-port", http, config.http.http_host or HOSTS),
        )
    )
    users, users_warnings = attempt(lambda: configured_users(config.users.users, file)) or (
        ConfiguredUsers(),
        (),
    )
    if settings is not None:
        attempt(lambda: engine_options(config, settings, os.environ))
    certificates = {nats.tls if nats else None, attempt(lambda: tls_options(config.tls))}
    for certificate in filter(None, certificates):
        problems = check_readable(certificate)
        for problem in problems:
            note_file(problem)
        if not problems:
            attempt(partial(create_ssl_context, certificate))
    if (data_dir := config.durability.data_dir) is not None:
        attempt(lambda: _check_data_dir(data_dir))
    ineffective = file.ineffective_settings(settings) if settings is not None else []
    return errors, [
        *old_value_warnings(configuration),
        *users_warnings,
        *nats_users.secret_warnings(os.environ),
        *ineffective,
        *tls_warnings(certificates),
        *certificate_user_warnings(users, certificates),
    ]


_FILES = {"the certificate ": "cert", "the key ": "key", "the CA certificate ": "ca"}
"""Last word of an option by the beginning of its error; one file may serve several options."""


def _with_option(message: str, config: ServerConfig) -> str:
    """Return an error about a file with the option that names the file in front."""
    kind = next((end for begin, end in _FILES.items() if message.startswith(begin)), "")
    candidates = [
        (setting.name.endswith(kind), len(str(value)), setting.flag)
        for setting, value in config.items()
        if isinstance(value, Path) and str(value) in message
    ]
    return f"{max(candidates)[2]}: {message}" if candidates else message


def _check_ports(
    configuration: Configuration, *listeners: tuple[str, int | None, tuple[str, ...]]
) -> None:
    """Raise ValueError if two listeners, each (option, port, hosts), would use the same port."""
    for (flag, port, hosts), (other_flag, other_port, other_hosts) in combinations(listeners, 2):
        shared_hosts = set(hosts) & set(other_hosts) or _ALL_ADDRESSES & {*hosts, *other_hosts}
        if port and port == other_port and shared_hosts:
            if configuration.sources.get(normalize(other_flag[2:])) is not Source.FILE:
                flag, other_flag = other_flag, flag  # Report the option that the file sets.
            raise ValueError(f"{other_flag}: {flag} is {port} already")


_ALL_ADDRESSES = {"0.0.0.0", "::"}


def _check_data_dir(data_dir: Path) -> None:
    """Raise ValueError if the directory cannot hold a journal."""
    try:
        check_directory(data_dir)
    except JournalError as error:
        raise ValueError(f"--data-dir: {error}") from None
