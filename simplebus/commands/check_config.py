"""`simplebus check-config` and `simplebus config`: what a file says, and what one could say.

Rule 1: a file is looked at as `serve --config FILE` would, with the files that it names, and all
that is wrong with it is told at once. Nothing is started.
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
from simplebus.config.file import Check, Config
from simplebus.config.messages import name_options_by_source, option_names_in
from simplebus.config.mistakes import MESSAGES_MAX
from simplebus.config.parse import HOSTS
from simplebus.config.server_settings import server_settings
from simplebus.console.errors import CONFIG_STATUS, describe_error, fail

CHECK_HELP = (
    "Say what is wrong with a configuration file, if anything is.\n\n"
    "It is looked at as [bold]simplebus serve --config FILE[/bold] would, with the files that "
    "it names; nothing is started. Every mistake is told, with its line; the exit status is 78 "
    "then.\n\n\b\n"
    "  simplebus check-config /etc/simplebus.toml"
)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=(
        "Configuration files of `simplebus serve`.\n\n\b\n"
        "  simplebus config sample > simplebus.toml\n\n"
        "[bold]simplebus check-config[/bold] looks one over."
    ),
)


def check_config(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="FILE", show_default=False, help="The TOML file to be checked.")
    ],
) -> None:
    config, mistakes = looked_over(file)
    from simplebus.commands.serve.settings import SECRET_VARIABLES

    root = context.find_root().command
    unread = unread_variables(os.environ, serve_command_of(), root, SECRET_VARIABLES)
    for warning in (*config.warnings, *unread):
        typer.echo(f"simplebus: {warning}", err=True)
    if mistakes:
        fail("\n".join(mistakes[:MESSAGES_MAX]), status=CONFIG_STATUS)
    typer.echo(f"{file} is fine")


@app.command(
    help=(
        "Print a configuration file with every setting, its default and what it means.\n\n"
        "What is commented out is as it is by itself; take the # away to change it.\n\n\b\n"
        "  simplebus config sample > simplebus.toml"
    )
)
def sample() -> None:
    from simplebus.config.sample import text

    typer.echo(text(serve_command_of().params), nl=False)


def serve_command_of() -> Any:
    """The command that a file is for."""
    from simplebus.commands.serve.command import serve

    alone = typer.Typer(add_completion=False)
    alone.command()(serve)
    return typer.main.get_command(alone)


def looked_over(file: str) -> tuple[Config, list[str]]:
    """What a file says, and all that is wrong with it, each with the file and the line, and with
    variables of the environment.

    What contradicts something else is left out, and the rest looked at again."""
    command, check = serve_command_of(), Check()
    found: dict[str, None] = {}
    for parameter, said in find_invalid_variables(command, typer.Context(command)).items():
        found[said] = None
        parameter.envvar = None
    while True:
        with command.make_context("simplebus serve", ["--config", file], obj=check) as given:
            config: Config = given.params["config"]
            told, warnings = _contradictions(cast(typer.Context, given))
        found |= dict.fromkeys(told)
        culprits = [name for names in told.values() for name in names if name in config.options]
        if not culprits or len(found) >= MESSAGES_MAX:
            break
        check.ignored_options.add(culprits[0])
    config = replace(config, warnings=(*config.warnings, *warnings))
    return config, sorted(dict.fromkeys((*check.messages, *found)), key=partial(_line, file))


def _line(file: str, mistake: str) -> int:
    """Of a mistake that has one in this file; those that have none come last."""
    found = re.match(re.escape(file) + r":(\d+): ", mistake)
    return int(found[1]) if found else sys.maxsize


def _contradictions(context: typer.Context) -> tuple[dict[str, list[str]], list[str]]:
    """What of a file that is good key by key does not fit together, and which files that it names
    are no good: each with the options that it names. And what is to be warned of."""
    from simplebus.commands.serve import jetstream_options
    from simplebus.commands.serve.option_values import convert_params
    from simplebus.commands.serve.settings import http_listener, nats_listener
    from simplebus.commands.serve.tls_options import (
        configured_users,
        shut_out,
        tls_options,
        trusting,
    )
    from simplebus.server.tls.certificates import check_readable
    from simplebus.server.tls.certificates import create_ssl_context as tls_context

    found: dict[str, list[str]] = {}
    convert_params(context)
    config: Config = context.params["config"]

    def tried(look: Callable[[], Any]) -> Any:
        try:
            return look()
        except OSError as error:
            note_file(error)
        except ValueError as error:
            note(error, option_names_in(str(error)))
        return None

    def note_file(error: OSError) -> None:
        note(ValueError(_with_option(describe_error(error), context)), [])

    def note(error: ValueError, names: list[str]) -> None:
        for said in str(name_options_by_source(error, context)).splitlines():
            is_told = said.startswith((f"{config.path}:", f"{config.path} ", PREFIX))
            found[said if is_told else config.add_location(said)] = names

    chosen = tried(lambda: server_settings(**context.params))
    door = tried(lambda: nats_listener(context))
    operators = tried(lambda: http_listener(context))
    hosts = tuple(context.params["host"] or HOSTS)
    tried(
        lambda: _look_at_ports(
            config,
            ("--port", context.params["port"], hosts),
            ("--nats-port", door.port if door else None, hosts),
            *([("--http-port", operators.port, operators.hosts)] if operators else []),
        )
    )
    users = tried(lambda: configured_users(context.params["users"], context.params["config"]))
    if chosen is not None:
        tried(
            lambda: jetstream_options.engine_options(
                chosen, environment=os.environ, **context.params
            )
        )
    certificates = {door.tls if door else None, tried(lambda: tls_options(**context.params))}
    for each in filter(None, certificates):
        problems = check_readable(each)
        for problem in problems:
            note_file(problem)
        if not problems:
            tried(partial(tls_context, each))
    if (folder := context.params["data_dir"]) is not None:
        tried(lambda: _look_at_folder(folder))
    idle = config.ineffective_settings(chosen) if chosen is not None else []
    return found, [*idle, *trusting(certificates), *shut_out(users, certificates)]


_FILES = {"the certificate ": "cert", "the key ": "key", "the CA certificate ": "ca"}
"""How options of files end, by how complaints of theirs begin: all may be in one file."""


def _with_option(said: str, context: typer.Context) -> str:
    """What is wrong with a file that an option names, behind that option."""
    kind = next((end for begin, end in _FILES.items() if said.startswith(begin)), "")
    named = [
        (name.endswith(kind), len(str(value)), name)
        for name, value in context.params.items()
        if isinstance(value, Path) and str(value) in said
    ]
    return f"--{max(named)[2].replace('_', '-')}: {said}" if named else said


def _look_at_ports(config: Config, *doors: tuple[str, int | None, tuple[str, ...]]) -> None:
    """Raise ValueError where two doors, each with its option, port and hosts, would listen at one
    place."""
    for (flag, port, hosts), (other, again, there) in combinations(doors, 2):
        if port and port == again and (set(hosts) & set(there) or _ALL & {*hosts, *there}):
            if other[2:].replace("-", "_") not in config.options:  # What the file says is told.
                flag, other = other, flag
            raise ValueError(f"{other}: {flag} is {port} already")


_ALL = {"0.0.0.0", "::"}


def _look_at_folder(folder: Path) -> None:
    """Raise ValueError where no journal can be."""
    from simplebus.storage.directory import check as check_directory
    from simplebus.storage.errors import JournalError

    try:
        check_directory(folder)
    except JournalError as error:
        raise ValueError(f"--data-dir: {error}") from None
