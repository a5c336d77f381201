"""`simplebus bridge`: copies classes from one bus to another until it is stopped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.commands.http_option import HttpAddress
from simplebus.config.errors import ConfigError
from simplebus.config.parse import option, parse_class, parse_pattern
from simplebus.config.server_schema import SETTINGS
from simplebus.console.errors import CONFIG_STATUS, USAGE_STATUS, describe_error, fail

if TYPE_CHECKING:
    from simplebus.bridge.settings import BridgeSettings

HELP = (
    "Copy classes from one bus to another, or to and from a NATS server.\n\n\b\n"
    "  simplebus bridge --from 127.0.0.1:8888 --to hq:8888 orders 7\n"
    "  simplebus bridge --from 127.0.0.1:8888 --to hq:8888 --both orders\n"
    "  simplebus bridge --from 127.0.0.1:8888 --to nats://hq:4222 orders\n"
    "  simplebus bridge --from 127.0.0.1:8888 --to nats://a,nats://b orders\n"
    "  simplebus bridge bridges.toml\n\n"
    "A message is acknowledged at the source when the target has confirmed it. Between two buses "
    "each message is stored once at the target, in order, even after failures. While the target is "
    "down, the source keeps the messages. A message is not copied to a bus that it has passed "
    "already. A file has more settings: see protocol/reference/configuration.md."
)


def _parse_rewrite(text: str | tuple[str, str]) -> tuple[str, str]:
    if isinstance(text, tuple):
        return text
    pattern, sign, template = text.partition("=")
    if not sign:
        raise typer.BadParameter(f"{text!r} is not a rewrite rule; write PATTERN=TEMPLATE")
    return pattern, template


def bridge(
    context: typer.Context,
    classes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CLASS... | FILE",
            show_default=False,
            help="Ids or names of the classes to copy, or a TOML file with [[bridges]].",
        ),
    ] = None,
    from_: Annotated[
        str | None,
        option(
            "--from",
            "Source: HOST:PORT, or nats://HOST:PORT; for a NATS cluster several addresses, "
            "separated by commas.",
            metavar="URL",
        ),
    ] = None,
    to: Annotated[
        str | None,
        option("--to", "Target, in the same form.", metavar="URL"),
    ] = None,
    both: Annotated[bool, option("--both", "Copy in both directions.")] = False,
    name: Annotated[
        str,
        option(
            "--name",
            "Name under which the buses store the bridge's position. Give each bridge its own.",
            metavar="NAME",
        ),
    ] = "bridge",
    channel: Annotated[
        list[str] | None,
        option(
            "--channel",
            "Copy only messages on channels that match. Repeat the option for more patterns.",
            metavar="PATTERN",
            parser=parse_pattern,
            show_default=False,
        ),
    ] = None,
    rewrite: Annotated[
        list[Any] | None,
        option(
            "--rewrite",
            "Rename channels: 'orders.*.#=*.orders.#'. The first matching rule applies.",
            metavar="PATTERN=TEMPLATE",
            parser=_parse_rewrite,
            show_default=False,
        ),
    ] = None,
    hops: Annotated[
        int,
        option("--hops", "Maximum number of buses that a copied message has passed.", metavar="N"),
    ] = 16,
    no_path: Annotated[
        bool,
        option(
            "--no-path",
            "Omit the bridge path header for a NATS target. Use it only if no bridge copies the "
            "messages back.",
        ),
    ] = False,
    http: HttpAddress = None,
    log_level: Annotated[Any, SETTINGS["log_level"].option(reads_variable=True)] = "info",
    log_format: Annotated[Any, SETTINGS["log_format"].option(reads_variable=True)] = "console",
) -> None:
    import trio

    from simplebus.bridge.runner import create_copiers
    from simplebus.logs.configure import configure_logging
    from simplebus.server.runtime.heap import keep_freed_memory_mapped

    arguments = classes or []
    is_file = len(arguments) == 1 and arguments[0].endswith(".toml")
    try:
        if is_file:
            if from_ or to:
                raise ConfigError(
                    f"--from and --to cannot be combined with the file {arguments[0]}"
                )
            bridges = _read_bridges(Path(arguments[0]))
        else:
            _check_no_secret(context)
            bridges = [
                _build_bridge(
                    name,
                    from_ or "",
                    to or "",
                    arguments,
                    both=both,
                    hops=hops,
                    path=not no_path,
                    channels=tuple(channel or ()),
                    rewrite=tuple(rewrite or ()),
                )
            ]
        copiers = create_copiers(
            [_add_environment_credentials(bridge_settings) for bridge_settings in bridges]
        )
    except typer.BadParameter as error:
        fail(error.message, status=USAGE_STATUS)
    except ValueError as error:
        fail(str(error), status=CONFIG_STATUS if is_file else USAGE_STATUS)
    configure_logging(log_level, log_format)
    keep_freed_memory_mapped()
    trio.run(_run, copiers, http)


def _check_no_secret(context: typer.Context) -> None:
    """Raise ConfigError if an address on the command line contains credentials."""
    for name, flag, prefix in (
        ("from_", "--from", "SIMPLEBUS_FROM_"),
        ("to", "--to", "SIMPLEBUS_TO_"),
    ):
        source = context.get_parameter_source(name)
        is_seen = source is not None and source.name == "COMMANDLINE"
        if is_seen and "@" in (context.params[name] or ""):
            raise ConfigError(
                f"{flag}: the address contains credentials, which every user of this machine can "
                f"list: expected HOST:PORT or nats://HOST:PORT, and {prefix}USER and "
                f"{prefix}PASSWORD, or {prefix}TOKEN, in the environment"
            )


def _build_bridge(
    name: str,
    source: str,
    target: str,
    classes: list[str],
    *,
    both: bool,
    hops: int,
    path: bool,
    channels: tuple[str, ...],
    rewrite: tuple[tuple[str, str], ...],
) -> BridgeSettings:
    from simplebus.bridge.settings import BridgeSettings, CopiedClass

    if not source or not target:
        raise ConfigError("expected --from and --to, or a file")
    copied = tuple(
        CopiedClass(parse_class(cls), channels=channels, rewrite=rewrite) for cls in classes
    )
    return BridgeSettings(
        name, source, target, copied, is_bidirectional=both, hops_max=hops, has_path=path
    )


def _add_environment_credentials(bridge: BridgeSettings) -> BridgeSettings:
    """Add credentials from SIMPLEBUS_FROM_USER, SIMPLEBUS_TO_CREDENTIALS and so on.

    They apply to an end without other credentials. Raises ValueError.
    """
    from simplebus.client.credentials import Access

    accesses: dict[str, Any] = {}
    for access, prefix in (
        ("source_access", "SIMPLEBUS_FROM_"),
        ("target_access", "SIMPLEBUS_TO_"),
    ):
        variables = {
            f"SIMPLEBUS_{name.removeprefix(prefix)}": value
            for name, value in os.environ.items()
            if name.startswith(prefix)
        }
        if variables and getattr(bridge, access) == Access():
            try:
                accesses[access] = Access.from_environment(variables)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{prefix}…: {describe_error(error)}") from None
    return replace(bridge, **accesses)


def _read_bridges(path: Path) -> Sequence[BridgeSettings]:
    """Return the bridges of a file. Raises ConfigError."""
    from simplebus.config.bridges import read_bridges
    from simplebus.config.table_reader import TableReader
    from simplebus.config.toml_document import read_document

    document, reader = read_document(path), TableReader(path.parent)
    reader.check_names(document.tables, ["bridges"], "")
    bridges = read_bridges(reader, document.tables.get("bridges", []), is_served=False)
    if not (bridges or reader.errors.messages):
        reader.errors.messages.append("the file has no bridges: expected a table [[bridges]]")
    if reader.errors.messages:
        raise ConfigError(*document.locate(reader.errors.messages))
    for warning in map(document.add_location, reader.warnings):
        typer.echo(f"simplebus: {warning}", err=True)
    return bridges


async def _run(copiers: list[Any], http: tuple[str, int] | None) -> None:

    import trio

    from simplebus.bridge.runner import log_progress, run_copiers
    from simplebus.server.signals import STOP_SIGNALS, open_signal_receiver
    from simplebus.server.systemd import notify

    fatal_errors: list[str] = []
    async with (
        open_signal_receiver(ignore_afterwards=True) as signals,
        trio.open_nursery() as nursery,
    ):
        if http is not None:
            from simplebus.bridge.metrics import bridge_snapshot
            from simplebus.monitor.dashboard import Dashboard
            from simplebus.server.http.server import start_http_server

            dashboard = Dashboard(lambda detailed: bridge_snapshot(copiers))
            addresses = await start_http_server(dashboard, [http[0]], http[1], nursery)
            typer.echo(f"simplebus bridge ready http={addresses[0]}")

        def on_failed(copier: Any) -> None:
            fatal_errors.append(f"{copier.name}: {copier.statistics().problem}")
            nursery.cancel_scope.cancel()

        nursery.start_soon(partial(run_copiers, copiers, on_failed=on_failed))
        notify("READY=1", f"STATUS={len(copiers)} copiers running")
        async for number in signals:
            if number in STOP_SIGNALS:
                break
        nursery.cancel_scope.cancel()
    for copier in copiers:
        log_progress(copier.statistics())
    if fatal_errors:
        fail("\n".join(fatal_errors), status=CONFIG_STATUS)
