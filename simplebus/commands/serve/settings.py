"""Complete server settings from the options of `serve`, and all errors in them.

A reload reads the configuration file again; options of the command line and the environment keep
their values. A file with an error changes nothing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from simplebus.commands.serve.jetstream_options import check_no_secret, engine_options
from simplebus.commands.serve.listener_options import configured_users, http_port, nats_options
from simplebus.commands.serve.tls_options import (
    certificate_user_warnings,
    tls_options,
    tls_warnings,
)
from simplebus.config.changed_values import Tables, compared_values
from simplebus.config.configuration import (
    Configuration,
    Source,
    name_options_by_source,
    old_value_warnings,
    read_configuration,
    settings_in,
)
from simplebus.config.errors import MESSAGES_MAX, ConfigError
from simplebus.config.nats_users import secret_warnings
from simplebus.config.parse import HOSTS
from simplebus.config.server_settings import server_settings
from simplebus.config.setting import PREFIX, normalize
from simplebus.config.users import ConfiguredUsers
from simplebus.console.errors import describe_error
from simplebus.console.installation import install_command

if TYPE_CHECKING:
    from simplebus.bridge.settings import BridgeSettings
    from simplebus.core.settings import Settings
    from simplebus.server.observability.message_spans import SpanRecorder
    from simplebus.server.run import ServeOptions
    from simplebus.server.tls.certificates import TlsOptions

T = TypeVar("T")

_ALL_ADDRESSES = {"0.0.0.0", "::"}
_FILES = {"the certificate ": "cert", "the key ": "key", "the CA certificate ": "ca"}
"""Last word of an option by the beginning of its error; one file may serve several options."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Complete settings of a server."""

    settings: Settings
    options: ServeOptions
    log_level: str
    log_format: str
    bridges: tuple[BridgeSettings, ...]
    warnings: tuple[str, ...]
    values: Tables
    """Values by table and key of the configuration file, compared after a reload."""


def build_plan(configuration: Configuration) -> ServerPlan:
    """Build the server settings.

    Raises:
        ValueError: If a variable is invalid, or settings contradict each other.
        ConfigError: If a mistake is in the configuration file.
    """
    builder = _PlanBuilder(configuration)
    plan = builder.build()
    if plan is not None:
        return plan
    messages = find_errors(configuration)[1]
    if builder.has_file_errors:
        raise ConfigError(*messages)
    raise ValueError("\n".join(messages))


def reload_plan(configuration: Configuration) -> ServerPlan:
    """Build the server settings with the file read again. Raises ConfigError."""
    path = configuration.file.document.path if configuration.file else None
    try:
        return build_plan(read_configuration(configuration.flags, os.environ, path))
    except ValueError as error:
        raise ConfigError(*str(error).splitlines()) from None


def check_file(file: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the warnings, and all errors in a configuration file and the environment variables.

    The files that settings name are checked, too.
    """
    return find_errors(read_configuration({}, os.environ, Path(file)))


def find_errors(configuration: Configuration) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the warnings, and all errors in the order of lines.

    Settings of the file that contradict others are ignored, and the rest is checked again.
    """
    found: dict[str, None] = {}
    named, ignored, file = set[str](), list[str](), configuration.file
    while True:
        builder = _PlanBuilder(configuration)
        builder.build(checks_files=file is not None)
        # An error found again, without the conflicting key of the file, names the same settings.
        found |= {
            message: None
            for message, names in builder.errors.items()
            if not named.issuperset(names or [""])
        }
        named |= {name for names in builder.errors.values() for name in names}
        conflicting = [
            name
            for names in builder.errors.values()
            for name in names
            if configuration.sources.get(name) is Source.FILE
        ]
        if file is None or not conflicting or len(found) >= MESSAGES_MAX:
            break
        ignored.append(conflicting[0])
        configuration = read_configuration(
            configuration.flags, os.environ, file.document.path, ignored=ignored
        )
    warnings = (*configuration.warnings, *builder.warnings)
    return warnings, tuple(found if file is None else sorted(found, key=_line))


def _line(message: str) -> int:
    """Return the line of an error for sorting; errors without a line come last."""
    match = re.match(r".*?:(\d+): ", message)
    return int(match[1]) if match else sys.maxsize


def _create_span_recorder() -> SpanRecorder:
    """Return the recorder of --trace-messages. Raises ValueError."""
    try:
        from simplebus.otel.server_spans import ServerSpans
    except ImportError as error:
        raise ValueError(
            f"--trace-messages needs OpenTelemetry ({error}): {install_command('otel')}"
        ) from None
    return ServerSpans()


class _PlanBuilder:
    """Builder of the settings of a server, which continues after an error."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self.errors: dict[str, list[str]] = {}
        """Names of the settings that each error message names."""
        self.has_file_errors = bool(configuration.file_errors)
        self.warnings: tuple[str, ...] = ()

    def build(self, *, checks_files: bool = False) -> ServerPlan | None:
        """Return the settings; None after an error.

        With `checks_files`, the ports and the files that the settings name are checked, too.
        """
        configuration = self._configuration
        messages = (*configuration.file_errors, *configuration.variable_errors)
        self.errors = {message: [] for message in messages}
        config, file = configuration.config, configuration.file
        general = config.general
        if "engine" in configuration.names_on_command_line:
            self._attempt(lambda: check_no_secret(config))
        settings = self._attempt(
            lambda: server_settings(config, file.class_settings if file else None)
        )
        configured, users_warnings = self._attempt(
            lambda: configured_users(config.users.users, file)
        ) or (ConfiguredUsers(), ())
        users = self._attempt(lambda: configured.to_users(os.urandom(32)))
        nats = self._attempt(lambda: nats_options(configuration, os.environ, users=users))
        http = self._attempt(lambda: http_port(configuration))
        tls = self._attempt(lambda: tls_options(config.tls))
        span_recorder = None
        if config.http.trace_messages:
            span_recorder = self._attempt(_create_span_recorder)
        cluster = None
        if settings is not None:
            cluster = self._attempt(lambda: engine_options(config, settings, os.environ))
        certificates = tls, nats.tls if nats else None
        if checks_files:
            self._check_files(nats.port if nats else None, http, certificates)
        self.warnings = (
            *old_value_warnings(configuration),
            *users_warnings,
            *secret_warnings(os.environ),
            *(file.ineffective_settings(settings) if file and settings else ()),
            *tls_warnings(certificates),
            *certificate_user_warnings(configured, certificates),
        )
        if self.errors or settings is None or nats is None:
            return None
        from simplebus.core.users.rate_limit import RateLimit
        from simplebus.server.run import ServeOptions

        limits = config.users
        options = ServeOptions(
            hosts=tuple(dict.fromkeys(general.host or HOSTS)),
            port=general.port,
            nats_port=nats.port,
            nats=nats.settings,
            nats_tls=nats.tls,
            http_port=http,
            http_hosts=tuple(dict.fromkeys(config.http.http_host or HOSTS)),
            http_names=config.http.http_name,
            span_recorder=span_recorder,
            tls=tls,
            users=users,
            per_address=limits.max_connections_per_address,
            connection_rate=limits.max_connection_rate,
            publish_rate=RateLimit(limits.max_message_rate, limits.max_byte_rate),
            classes=(*nats.classes, *config.memory.last_values),
            data_dir=config.durability.data_dir,
            cluster=cluster,
            durability=config.durability.durability,
            drain_seconds=config.timeouts.drain_timeout,
            verbose=general.verbose,
        )
        return ServerPlan(
            settings,
            options,
            general.log_level,
            general.log_format,
            file.bridges if file else (),
            (*configuration.warnings, *self.warnings),
            compared_values(config, file.document.tables if file else {}, configured.tables),
        )

    def _attempt(self, build: Callable[[], T]) -> T | None:
        """Return the result; None, after noting the error, if a ValueError or OSError is raised."""
        try:
            return build()
        except OSError as error:
            self._note_file_error(error)
        except ValueError as error:
            self._note(error)
        return None

    def _note_file_error(self, error: OSError) -> None:
        """Note an error about a file, with the option that names the file in front."""
        message = describe_error(error)
        kind = next((end for begin, end in _FILES.items() if message.startswith(begin)), "")
        candidates = [
            (setting.name.endswith(kind), len(str(value)), setting.flag)
            for setting, value in self._configuration.config.items()
            if isinstance(value, Path) and str(value) in message
        ]
        option = f"{max(candidates)[2]}: " if candidates else ""
        self._note(ValueError(option + message), has_conflict=False)

    def _note(self, error: ValueError, *, has_conflict: bool = True) -> None:
        """Note the messages of an error, with options named as the user wrote them."""
        named = name_options_by_source(error, self._configuration)
        self.has_file_errors |= isinstance(named, ConfigError)
        file, sources = self._configuration.file, self._configuration.sources
        texts = str(error).splitlines(), str(named).splitlines()
        for original, message in zip(*texts, strict=True):
            names = [setting.name for setting in settings_in(original)]
            is_of_flags = any(sources.get(name) is Source.FLAG for name in names)
            if (
                file
                and not is_of_flags
                and not message.startswith((str(file.document.path), PREFIX))
            ):
                message = file.document.add_location(message)
            self.errors[message] = names if has_conflict else []

    def _check_files(
        self, nats_port: int | None, http: int | None, certificates: Iterable[TlsOptions | None]
    ) -> None:
        """Check that ports differ, and that certificates and the data directory can be used."""
        from simplebus.server.tls.certificates import check_readable, create_ssl_context
        from simplebus.storage.directory import check_directory
        from simplebus.storage.errors import JournalError

        config = self._configuration.config
        hosts = config.general.host or HOSTS
        listeners = (
            ("--port", config.general.port, hosts),
            ("--nats-port", nats_port, hosts),
            ("--http-port", http, config.http.http_host or HOSTS),
        )
        self._attempt(lambda: _check_ports(self._configuration, listeners))
        for certificate in dict.fromkeys(filter(None, certificates)):
            problems = check_readable(certificate)
            for problem in problems:
                self._note_file_error(problem)
            if not problems:
                self._attempt(partial(create_ssl_context, certificate))
        try:
            if config.durability.data_dir is not None:
                check_directory(config.durability.data_dir)
        except JournalError as error:
            self._note(ValueError(f"--data-dir: {error}"))


def _check_ports(
    configuration: Configuration, listeners: Iterable[tuple[str, int | None, tuple[str, ...]]]
) -> None:
    """Raise ValueError if two listeners, each (option, port, hosts), would use the same port."""
    for (flag, port, hosts), (other_flag, other_port, other_hosts) in combinations(listeners, 2):
        shared_hosts = set(hosts) & set(other_hosts) or _ALL_ADDRESSES & {*hosts, *other_hosts}
        if port and port == other_port and shared_hosts:
            if configuration.sources.get(normalize(other_flag[2:])) is not Source.FILE:
                flag, other_flag = other_flag, flag  # Report the option that the file sets.
            raise ValueError(f"{other_flag}: port {port} is already used by {flag}")
