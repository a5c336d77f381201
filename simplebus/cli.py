"""The `simplebus` command line: declares options and calls one function per command.

Commands import their implementation when they run, so that `--help` is fast. Errors are printed
as one sentence on standard error. Exit statuses: 2 for invalid options, 78 for an invalid file,
130 for Ctrl-C, 1 for everything else; `serve` has more, see `simplebus.console.errors`.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from simplebus.commands import (
    backup,
    bridge,
    check_config,
    gateway,
    journal,
    sbom,
    systemd_unit,
    user,
)
from simplebus.commands.client_options import with_client_options
from simplebus.commands.deploy import command as deploy_command
from simplebus.commands.operate import admin, dlq, explain, forget, messages, top
from simplebus.commands.serve import command
from simplebus.config.environment import describe_invalid_variable, remove_service_links
from simplebus.config.parse import (
    URL,
    URL_OPTION,
    parse_channel,
    parse_class,
    parse_header,
    parse_pattern,
    parse_pauses,
    parse_seconds,
    parse_size,
    parse_start,
    parse_url,
)
from simplebus.console.errors import (
    MEMORY_STATUS,
    USAGE_STATUS,
    describe_error,
    fail,
    flatten_errors,
)
from simplebus.console.installation import find_conflict
from simplebus.core.errors import BusError
from simplebus.core.limits import CLASS_ID_MAX, DELIVERIES_MAX
from simplebus.spark import commands as pipeline


class CommandGroup(TyperGroup):
    """Command group that names the environment variable when its value is invalid.

    typer would name an option that the user has not given.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if (message := describe_invalid_variable(error)) is None:
                raise
            fail(message, status=USAGE_STATUS)


app = typer.Typer(
    name="simplebus",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help=(
        "A message bus that acknowledges every message.\n\n"
        "[bold]simplebus demo[/bold] shows the bus at work in ten seconds. To use it, open three "
        "terminals:\n\n\b\n"
        "  simplebus serve\n"
        "  simplebus sub 1\n"
        '  simplebus pub 1 "hello"\n\n'
        "Messages are published to a class, which is a number from 0 to 65535 or a name. Every "
        "subscriber of the class receives each message, in order. A message is redelivered until "
        "the subscriber acknowledges it."
    ),
)


_USE, _OPERATE, _CONNECT, _SET_UP = "Use it", "Look after it", "Join it to others", "Set it up"
"""Headings of the command list in the help."""

# Options ------------------------------------------------------------------------------------------

_CLASS = typer.Argument(
    parser=parse_class,
    metavar="CLASS",
    show_default=False,
    help="The message class: its id, from 0 to 65535, or its name.",
)


# Commands ----------------------------------------------------------------------------------------


def _show_version(is_requested: bool) -> None:
    if is_requested:
        from simplebus.console.installation import installed_version

        typer.echo(f"simplebus {installed_version() or '(source tree, not installed)'}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Handle the options before the command."""


@app.command(
    rich_help_panel=_USE,
    help=(
        "Show the bus at work for ten seconds, with real processes and without any set-up.\n\n"
        "The demo starts a server, a publisher and two subscribers on this machine. One subscriber "
        "stops acknowledging for a while; the other is killed with messages in flight and is "
        "restarted. At the end all sent messages are compared with all received messages. The exit "
        "status is 0 only if no message was lost, reordered or damaged.\n\n\b\n"
        "  simplebus demo"
    ),
)
def demo() -> None:
    import logging

    import trio
    from rich.console import Console

    from simplebus.demo.display import LiveDisplay, PlainDisplay
    from simplebus.demo.scenario import demo as run_demo
    from simplebus.demo.verdict import format_verdict

    logging.getLogger("simplebus").setLevel(logging.ERROR)  # The demo provokes the warnings.
    console = Console()
    with LiveDisplay(console) if console.is_terminal else PlainDisplay() as display:
        verdict = trio.run(run_demo, display)
    for line in format_verdict(verdict):
        typer.echo(line)
    if not verdict.has_passed:
        raise typer.Exit(1)


app.command(rich_help_panel=_USE, help=command.HELP)(command.serve)


@app.command(
    rich_help_panel=_USE,
    help=(
        "Publish messages.\n\n\b\n"
        "  simplebus pub 1 hello world              two messages\n"
        "  tail -f app.log | simplebus pub 1        one message per line\n"
        "  simplebus pub 1 --count 1000000          generated messages\n"
        "  simplebus pub orders --channel eu.paid --header by=ada x\n\n"
        "If the class has no subscriber yet, its messages wait for the first one."
    ),
)
@with_client_options
def pub(
    class_: Annotated[Any, _CLASS],
    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            show_default=False,
            help="One message per TEXT. Without TEXT, each line of standard input is a message.",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", min=1, metavar="COUNT", help="Publish COUNT generated, numbered messages."
        ),
    ] = None,
    size: Annotated[
        int,
        typer.Option(
            "--size",
            parser=parse_size,
            metavar="SIZE",
            show_default="64",
            help="Size of each generated message in bytes.",
        ),
    ] = 64,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            min=0.001,
            metavar="RATE",
            show_default="no limit",
            help="Maximum number of generated messages per second.",
        ),
    ] = None,
    channel: Annotated[
        str | None,
        typer.Option(
            "--channel",
            parser=parse_channel,
            metavar="CHANNEL",
            show_default=False,
            help="Channel of each message, a dotted name such as orders.eu.paid.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="TEXT",
            show_default=False,
            help="Key of each message, such as a customer number. Key-ordered groups process the "
            "messages of a key in order.",
        ),
    ] = None,
    header: Annotated[
        list[Any] | None,
        typer.Option(
            "--header",
            parser=parse_header,
            metavar="NAME=VALUE",
            show_default=False,
            help="Header of each message. Repeat the option for more headers.",
        ),
    ] = None,
    expires: Annotated[
        float | None,
        typer.Option(
            "--expires",
            parser=parse_seconds,
            metavar="SECONDS",
            show_default="never",
            help="Seconds until each message expires. An expired message is not delivered.",
        ),
    ] = None,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    if text and count is not None:
        fail("got texts and --count; expected one of them", status=2)
    from functools import partial

    import trio

    from simplebus.commands import pubsub

    about = pubsub.publish_options(channel=channel, key=key, headers=header, expires=expires)
    if count is not None:
        job = partial(
            pubsub.publish_generated, url, class_, about, count=count, size=size, rate=rate
        )
    elif text:
        job = partial(pubsub.publish_texts, url, class_, about, text)
    else:
        if sys.stdin.isatty():
            typer.echo("Each line is a message. Ctrl-D ends.", err=True)
        job = partial(pubsub.publish_input, url, class_, about)
    sent = trio.run(job)
    typer.echo(f"{sent:,} message{'' if sent == 1 else 's'} sent to class {class_}", err=True)


@app.command(
    rich_help_panel=_USE,
    help=(
        "Print the messages of a class, one per line, and acknowledge them.\n\n\b\n"
        "  simplebus sub 1\n"
        "  simplebus sub 1 --count 10 --raw > ten-messages\n"
        "  simplebus sub orders --channel 'eu.*' --durable billing\n\n"
        "Stop it with Ctrl-C. The first subscriber of a class receives the waiting messages; later "
        "subscribers receive messages that are published from then on."
    ),
)
@with_client_options
def sub(
    class_: Annotated[Any, _CLASS],
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            min=1,
            metavar="COUNT",
            show_default="no limit",
            help="Exit after COUNT messages. Further messages stay for the next subscriber.",
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Print the unchanged bytes of each message and a line end. Without --raw, control "
            "characters and invalid UTF-8 are printed as escapes such as \\n and \\xff.",
        ),
    ] = False,
    no_ack: Annotated[
        bool,
        typer.Option(
            "--no-ack",
            help="Acknowledge no message. Messages are redelivered after the ack timeout and to "
            "the next subscriber.",
        ),
    ] = False,
    channel: Annotated[
        list[str] | None,
        typer.Option(
            "--channel",
            parser=parse_pattern,
            metavar="PATTERN",
            show_default="all messages",
            help="Receive only messages on channels that match: * matches one segment, # at the "
            "end matches any number of segments. Repeat the option for more patterns.",
        ),
    ] = None,
    durable: Annotated[
        str | None,
        typer.Option(
            "--durable",
            metavar="NAME",
            show_default=False,
            help="Name of a durable: the bus keeps its position, and the next subscriber of this "
            "name continues there.",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="NAME",
            show_default=False,
            help="Share the messages with the other subscribers of this group: each message goes "
            "to one member.",
        ),
    ] = None,
    by_key: Annotated[
        bool,
        typer.Option(
            "--by-key",
            help="Deliver the messages of a key one after the other, to one member of the group. "
            "Needs --group.",
        ),
    ] = False,
    start: Annotated[
        Any,
        typer.Option(
            "--start",
            parser=parse_start,
            metavar="WHERE",
            help="First message to receive: those waiting for a first subscriber (waiting), the "
            "next one published (new), the oldest or newest stored one (earliest, last), the last "
            "message of each channel (last_values), a sequence, or a time such as "
            "2026-01-31T08:00.",
        ),
    ] = "waiting",
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            "--max-in-flight",
            min=1,
            metavar="COUNT",
            show_default="65536; in a group 256",
            help="Maximum number of messages in flight, which are delivered but not yet "
            "acknowledged.",
        ),
    ] = None,
    ack_seconds: Annotated[
        float | None,
        typer.Option(
            "--ack-seconds",
            parser=parse_seconds,
            metavar="SECONDS",
            show_default="that of the class",
            help="Seconds until a message that is not acknowledged is redelivered.",
        ),
    ] = None,
    max_deliveries: Annotated[
        int | None,
        typer.Option(
            "--max-deliveries",
            min=0,
            max=DELIVERIES_MAX,
            metavar="COUNT",
            show_default="that of the class",
            help="Number of deliveries after which an unacknowledged message becomes a dead "
            "letter. 0 sets no limit.",
        ),
    ] = None,
    backoff: Annotated[
        Any,
        typer.Option(
            "--backoff",
            parser=parse_pauses,
            metavar="SECONDS,…",
            show_default="that of the class",
            help="Delays before the second, third and further deliveries, in seconds: 1,5,30.",
        ),
    ] = None,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    from functools import partial

    import trio

    from simplebus.commands import pubsub

    if by_key and group is None:
        raise typer.BadParameter("--by-key is about a group; expected --group NAME, too")
    ended_by = trio.run(
        partial(
            pubsub.print_messages,
            url,
            class_,
            channel or [],
            durable=durable,
            group=group,
            by_key=by_key,
            start=start,
            max_in_flight=max_in_flight,
            ack_seconds=ack_seconds,
            max_deliveries=max_deliveries,
            backoff=backoff,
            count=count,
            raw=raw,
            ack=not no_ack,
        )
    )
    if ended_by is not None:
        raise typer.Exit(128 + ended_by)


app.add_typer(pipeline.app, name="pipeline", rich_help_panel=_USE)
app.command(rich_help_panel=_OPERATE, help=top.HELP)(with_client_options(top.top))
app.command(rich_help_panel=_OPERATE, help=explain.HELP)(with_client_options(explain.explain))
app.command(rich_help_panel=_OPERATE, help=messages.PEEK_HELP)(with_client_options(messages.peek))
app.command(rich_help_panel=_OPERATE, help=messages.PURGE_HELP)(with_client_options(messages.purge))
app.add_typer(dlq.app, name="dlq", rich_help_panel=_OPERATE)
app.command(rich_help_panel=_OPERATE, help=forget.HELP)(with_client_options(forget.forget))
app.command(rich_help_panel=_OPERATE, help=admin.DISCONNECT_HELP)(
    with_client_options(admin.disconnect)
)
app.command(rich_help_panel=_OPERATE, help=admin.RELOAD_HELP)(with_client_options(admin.reload))
app.command(rich_help_panel=_OPERATE, help=admin.DRAIN_HELP)(with_client_options(admin.drain))
app.add_typer(journal.app, name="journal", rich_help_panel=_OPERATE)
app.command(rich_help_panel=_OPERATE, help=backup.BACKUP_HELP)(backup.backup)
app.command(rich_help_panel=_OPERATE, help=backup.RESTORE_HELP)(backup.restore)
app.command(rich_help_panel=_CONNECT, help=bridge.HELP)(bridge.bridge)
app.command(rich_help_panel=_CONNECT, help=gateway.HELP)(gateway.gateway)


@app.command(
    rich_help_panel=_USE,
    help=(
        "Measure the throughput and latency of the bus on this machine.\n\n"
        "A publisher and subscribers, each in its own process, pass messages through a server that "
        "is started for the benchmark, or through the one at --url. Every message is stored, "
        "delivered and acknowledged; every id and every byte is checked before a rate is printed. "
        "Then messages are sent one at a time to measure the latency.\n\n\b\n"
        "  simplebus bench\n"
        "  simplebus bench --messages 10000000 --size 16 --subscribers 2"
    ),
)
@with_client_options
def bench(
    messages: Annotated[
        int,
        typer.Option("--messages", min=1, metavar="COUNT", help="Number of messages to publish."),
    ] = 2_000_000,
    size: Annotated[
        int,
        typer.Option(
            "--size",
            parser=parse_size,
            metavar="SIZE",
            show_default="128",
            help="Size of each message in bytes, at least 16.",
        ),
    ] = 128,
    subscribers: Annotated[
        int,
        typer.Option(
            "--subscribers",
            min=1,
            metavar="COUNT",
            help="Number of subscribers that receive each message.",
        ),
    ] = 1,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            parser=parse_url,
            envvar="SIMPLEBUS_URL",
            show_envvar=False,
            show_default="start a server",
            help="Server to measure, as simplebus://HOST:PORT.",
        ),
    ] = None,
    class_id: Annotated[
        int,
        typer.Option(
            "--class",
            min=0,
            max=CLASS_ID_MAX - 1,
            metavar="CLASS",
            help="Id of the class to use, together with the next one. No other client may use them "
            "during the benchmark.",
        ),
    ] = 65000,
) -> None:
    import trio

    from simplebus.bench.run import BenchPlan, run_bench

    try:
        plan = BenchPlan(messages=messages, size=size, subscribers=subscribers, class_id=class_id)
    except ValueError as error:
        fail(str(error), status=2)
    for line in trio.run(run_bench, plan, url):
        typer.echo(line)


app.command("check-config", rich_help_panel=_SET_UP, help=check_config.CHECK_HELP)(
    check_config.check_config
)
app.add_typer(check_config.app, name="config", rich_help_panel=_SET_UP)
app.add_typer(user.app, name="user", rich_help_panel=_SET_UP)


app.command(
    "systemd-unit",
    rich_help_panel=_SET_UP,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help=systemd_unit.HELP,
)(systemd_unit.systemd_unit)
app.command(rich_help_panel=_SET_UP, help=deploy_command.HELP)(deploy_command.deploy)
app.command(rich_help_panel=_SET_UP, help=sbom.HELP)(sbom.sbom)


# Entry point --------------------------------------------------------------------------------------


def main() -> None:
    """Run `app`; print each expected error as one sentence and exit with its status."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # A standard stream is closed: a socket must not get its descriptor.
    os.close(descriptor)
    remove_service_links(os.environ)
    if (conflict := find_conflict()) is not None:
        typer.echo(f"simplebus: {conflict}", err=True)
        sys.exit(1)
    try:
        app(prog_name="simplebus")
    except (BaseExceptionGroup, BusError, OSError, MemoryError, KeyboardInterrupt) as error:
        causes = flatten_errors(error)
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            sys.exit(130)
        if not all(isinstance(cause, (BusError, OSError, MemoryError)) for cause in causes):
            raise  # A bug: show the traceback.
        if isinstance(causes[0], BrokenPipeError):  # The reader of standard output has ended.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the flush at exit.
        else:
            typer.echo(f"simplebus: {describe_error(causes[0])}", err=True)
        sys.exit(MEMORY_STATUS if isinstance(causes[0], MemoryError) else 1)
