"""`simplebus check-config` and `simplebus config sample`.

The file, and the files that it names, are checked as `serve --config FILE` does, without starting a
server. All errors are reported at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from simplebus.config.environment import PREFIX, find_invalid_variables, unread_variables
from simplebus.config.errors import MESSAGES_MAX
from simplebus.config.file import ConfigCheck, ConfigFile
from simplebus.config.option_names import name_options_by_source, option_names_in
from simplebus.config.parse import HOSTS
from simplebus.config.server_settings import server_settings
from simplebus.console.errors import CONFIG_STATUS, describe_error, fail

CHECK_HELP = (
    "Check a configuration file without starting a server.\n\n"
    "The file, and the files that it names, are checked as "
    "[bold]simplebus serve --config FILE[/bold] does. Every error is printed with its line; the "
    "exit status is then 78.\n\n\b\n"
    "  simplebus check-config /etc/simplebus.toml"
)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=(
        "Configuration files of `simplebus serve`.\n\n\b\n"
        "  simplebus config sample > simplebus.toml\n\n"
        "[bold]simplebus check-config[/bold] checks a file."
    ),
)


def check_config(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", show_default=False, help="TOML file of `serve` to check."),
    ],
) -> None:
    config, mistakes = check_file(file)
    from simplebus.commands.serve.settings import SECRET_VARIABLES

    root = context.find_root().command
    unread = unread_variables(os.environ, create_serve_command(), root, SECRET_VARIABLES)
    for warning in (*config.warnings, *unread):
        typer.echo(f"simplebus: {warning}", err=True)
    if mistakes:
        fail("\n".join(mistakes[:MESSAGES_MAX]), status=CONFIG_STATUS)
    typer.echo(f"{file} is fine")


@app.command(
    help=(
        "Print a sample configuration file with every setting, its default and its meaning.\n\n"
        "The settings are commented out; remove the # to change one.\n\n\b\n"
        "  simplebus config sample > simplebus.toml"
    )
)
def sample() -> None:
    from simplebus.config.sample import render_sample

    typer.echo(render_sample(create_serve_command().params), nl=False)


def create_serve_command() -> Any:
    """Return the typer command `serve`."""
    from simplebus.commands.serve.command import serve

    alone = typer.Typer(add_completion=False)
    alone.command()(serve)
    return typer.main.get_command(alone)


def check_file(file: str) -> tuple[ConfigFile, list[str]]:
    """Return the file's content and all errors in the file and the environment variables.

    Options that contradict others are ignored, and the rest is checked again.
    """
    command, check = create_serve_command(), ConfigCheck()
    errors: dict[str, None] = {}
    for parameter, said in find_invalid_variables(command, typer.Context(command)).items():
        errors[said] = None
        parameter.envvar = None
    while True:
        with command.make_context(
            "simplebus serve", ["--config", file], obj=check
        ) as serve_context:
            config: ConfigFile = serve_context.params["config"]
            conflicts, warnings = _find_conflicts(cast(typer.Context, serve_context))
        errors |= dict.fromkeys(conflicts)
        conflicting = [
            name for names in conflicts.values() for name in names if name in config.options
        ]
        if not conflicting or len(errors) >= MESSAGES_MAX:
            break
        check.ignored_options.add(conflicting[0])
    config = replace(config, warnings=(*config.warnings, *warnings))
    return config, sorted(dict.fromkeys((*check.messages, *errors)), key=partial(_line, file))


def _line(file: str, mistake: str) -> int:
    """Return the line of an error for sorting; errors without a line come last."""
    match = re.match(re.escape(file) + r":(\d+): ", mistake)
    return int(match[1]) if match else sys.maxsize


def _find_conflicts(context: typer.Context) -> tuple[dict[str, list[str]], list[str]]:
    """Find contradictions between valid values, and unusable files that the values name.

    Returns:
        The options that each error message names, and the warnings.
    """
    from simplebus.commands.serve import jetstream_options
    from simplebus.commands.serve.option_values import convert_params
    from simplebus.commands.serve.settings import http_listener, nats_listener
    from simplebus.commands.serve.tls_options import (
        certificate_user_warnings,
        configured_users,
        tls_options,
        tls_warnings,
    )
    from simplebus.server.tls.certificates import check_readable
    from simplebus.server.tls.certificates import create_ssl_context as tls_context

    errors: dict[str, list[str]] = {}
    convert_params(context)
    config: ConfigFile = context.params["config"]

    def attempt(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except OSError as error:
            note_file(error)
        except ValueError as error:
            note(error, option_names_in(str(error)))
        return None

    def note_file(error: OSError) -> None:
        note(ValueError(_with_option(describe_error(error), context)), [])

    def note(error: ValueError, options: list[str]) -> None:
        for message in str(name_options_by_source(error, context)).splitlines():
            is_told = message.startswith((f"{config.path}:", f"{config.path} ", PREFIX))
            errors[message if is_told else config.add_location(message)] = options

    settings = attempt(lambda: server_settings(**context.params))
    listener = attempt(lambda: nats_listener(context))
    http = attempt(lambda: http_listener(context))
    hosts = tuple(context.params["host"] or HOSTS)
    attempt(
        lambda: _check_ports(
            config,
            ("--port", context.params["port"], hosts),
            ("--nats-port", listener.port if listener else None, hosts),
            *([("--http-port", http.port, http.hosts)] if http else []),
        )
    )
    users = attempt(lambda: configured_users(context.params["users"], context.params["config"]))
    if settings is not None:
        attempt(
            lambda: jetstream_options.engine_options(
                settings, environment=os.environ, **context.params
            )
        )
    certificates = {
        listener.tls if listener else None,
        attempt(lambda: tls_options(**context.params)),
    }
    for certificate in filter(None, certificates):
        problems = check_readable(certificate)
        for problem in problems:
            note_file(problem)
        if not problems:
            attempt(partial(tls_context, certificate))
    if (data_dir := context.params["data_dir"]) is not None:
        attempt(lambda: _check_data_dir(data_dir))
    ineffective = config.ineffective_settings(settings) if settings is not None else []
    return errors, [
        *ineffective,
        *tls_warnings(certificates),
        *certificate_user_warnings(users, certificates),
    ]


_FILES = {"the certificate ": "cert", "the key ": "key", "the CA certificate ": "ca"}
"""Last word of an option by the beginning of its error; one file may serve several options."""


def _with_option(message: str, context: typer.Context) -> str:
    """Return an error about a file with the option that names the file in front."""
    kind = next((end for begin, end in _FILES.items() if message.startswith(begin)), "")
    candidates = [
        (name.endswith(kind), len(str(value)), name)
        for name, value in context.params.items()
        if isinstance(value, Path) and str(value) in message
    ]
    return f"--{max(candidates)[2].replace('_', '-')}: {message}" if candidates else message


def _check_ports(config: ConfigFile, *listeners: tuple[str, int | None, tuple[str, ...]]) -> None:
    """Raise ValueError if two listeners, each (option, port, hosts), would use the same port."""
    for (flag, port, hosts), (other_flag, other_port, other_hosts) in combinations(listeners, 2):
        shared_hosts = set(hosts) & set(other_hosts) or _ALL_ADDRESSES & {*hosts, *other_hosts}
        if port and port == other_port and shared_hosts:
            if other_flag[2:].replace("-", "_") not in config.options:
                flag, other_flag = other_flag, flag  # Report the option that the file sets.
            raise ValueError(f"{other_flag}: {flag} is {port} already")


_ALL_ADDRESSES = {"0.0.0.0", "::"}


def _check_data_dir(data_dir: Path) -> None:
    """Raise ValueError if the directory cannot hold a journal."""
    from simplebus.storage.directory import check_directory
    from simplebus.storage.errors import JournalError

    try:
        check_directory(data_dir)
    except JournalError as error:
        raise ValueError(f"--data-dir: {error}") from None
