"""The command line: options in, one call out.

Rule 1: nothing heavy is imported here. A command imports what it runs, so that help is instant.
Rule 2: every option says what it bounds and what happens there, and has an environment variable.
Rule 3: what goes wrong is one sentence on standard error and an exit status, never a traceback:
2 for values that make no sense, 78 for files with mistakes, 130 for Ctrl-C, 1 for everything else;
`serve` has some more, see complaints.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from simplebus.commands import (
    bridge,
    check_config,
    dlq,
    explain,
    forget,
    gateway,
    journal,
    systemd_unit,
    top,
    user,
)
from simplebus.commands.client_options import with_access
from simplebus.commands.serve import command
from simplebus.config.environment import remove_service_links, describe_invalid_variable
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
from simplebus.console.errors import MEMORY_STATUS, USAGE_STATUS, fail, flatten_errors, describe_error
from simplebus.console.installation import find_conflict
from simplebus.core.errors import BusError
from simplebus.core.limits import CLASS_ID_MAX, DELIVERIES_MAX
from simplebus.spark import commands as pipeline

_FROM_ENVIRONMENT = (
    "Each option can be set by an environment variable too: --port by SIMPLEBUS_PORT, and so on."
)


class _Commands(TyperGroup):
    """A variable of the environment that makes no sense is told by its own name: who reads that has
    given no option."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if (said := describe_invalid_variable(error)) is None:
                raise
            fail(said, status=USAGE_STATUS)


app = typer.Typer(
    name="simplebus",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help=(
        "A message bus that acknowledges every message.\n\n"
        "[bold]simplebus demo[/bold] shows it at work, in ten seconds. To use it, in three "
        "terminals:\n\n\b\n"
        "  simplebus serve\n"
        "  simplebus sub 1\n"
        '  simplebus pub 1 "hello"\n\n'
        "Messages are published to a class, a number from 0 to 65535 or a name. Every subscriber "
        "of the class gets each of them, in order, and again until it has acknowledged it."
    ),
)


_USE, _LOOK_AFTER, _JOIN, _SET_UP = "Use it", "Look after it", "Join it to others", "Set it up"
"""Under which headings the help lists commands."""

# Options ------------------------------------------------------------------------------------------

_CLASS = typer.Argument(
    parser=parse_class,
    metavar="CLASS",
    show_default=False,
    help="The class of messages: its id, a number from 0 to 65535, or its name.",
)


# Commands ----------------------------------------------------------------------------------------


def _show_version(wanted: bool) -> None:
    if wanted:
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
    """Options that stand before a command."""


@app.command(
    rich_help_panel=_USE,
    help=(
        "See the bus at work: ten seconds, real processes, nothing to set up.\n\n"
        "A server, a publisher and two subscribers are started on this machine. One subscriber "
        "stops acknowledging for a while, the other is killed with messages in flight and comes "
        "back. At the end everything that was sent is compared with everything that was received, "
        "and the exit status is 0 only if nothing was lost, misplaced or damaged.\n\n\b\n"
        "  simplebus demo"
    ),
)
def demo() -> None:
    import logging

    import trio
    from rich.console import Console

    from simplebus.demo.display import LiveDisplay, PlainDisplay
    from simplebus.demo.drill import demo as run_demo
    from simplebus.demo.verdict import lines

    logging.getLogger("simplebus").setLevel(logging.ERROR)  # What is done here is done on purpose.
    console = Console()
    with LiveDisplay(console) if console.is_terminal else PlainDisplay() as display:
        verdict = trio.run(run_demo, display)
    for line in lines(verdict):
        typer.echo(line)
    if not verdict.passed:
        raise typer.Exit(1)


app.command(rich_help_panel=_USE, help=command.HELP)(command.serve)


@app.command(
    rich_help_panel=_USE,
    help=(
        "Publish messages.\n\n\b\n"
        "  simplebus pub 1 hello world              two messages\n"
        "  tail -f app.log | simplebus pub 1        a message for each line\n"
        "  simplebus pub 1 --count 1000000          generated ones\n"
        "  simplebus pub orders --channel eu.paid --header by=ada x\n\n"
        "Messages that nobody has subscribed to yet wait for the class's first subscriber."
    ),
)
@with_access
def pub(
    class_: Annotated[Any, _CLASS],
    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            show_default=False,
            help="A message each. Without any, every line of standard input is one.",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, metavar="COUNT", help="Generate so many numbered messages."),
    ] = None,
    size: Annotated[
        int,
        typer.Option(
            "--size",
            parser=parse_size,
            metavar="SIZE",
            show_default="64",
            help="How long each generated message is.",
        ),
    ] = 64,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            min=0.001,
            metavar="RATE",
            show_default="as fast as the bus takes them",
            help="At most so many generated messages a second.",
        ),
    ] = None,
    channel: Annotated[
        str | None,
        typer.Option(
            "--channel",
            parser=parse_channel,
            metavar="CHANNEL",
            show_default=False,
            help="The channel of each message, a dotted name such as orders.eu.paid.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="TEXT",
            show_default=False,
            help="What belongs together, such as a customer's number.",
        ),
    ] = None,
    header: Annotated[
        list[Any] | None,
        typer.Option(
            "--header",
            parser=parse_header,
            metavar="NAME=VALUE",
            show_default=False,
            help="A header of each message. May be given several times.",
        ),
    ] = None,
    expires: Annotated[
        float | None,
        typer.Option(
            "--expires",
            parser=parse_seconds,
            metavar="SECONDS",
            show_default="never",
            help="After so many seconds nobody gets the message any more.",
        ),
    ] = None,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    if text and count is not None:
        fail("give texts or --count, not both", status=2)
    from functools import partial

    import trio

    from simplebus.commands import pubsub

    about = pubsub.said(channel=channel, key=key, headers=header, expires=expires)
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
        "Print the messages of a class, a line each, and acknowledge them.\n\n\b\n"
        "  simplebus sub 1\n"
        "  simplebus sub 1 --count 10 --raw > ten-messages\n"
        "  simplebus sub orders --channel 'eu.*' --durable billing\n\n"
        "It ends with Ctrl-C. The first subscriber of a class gets what is waiting there; a "
        "further one gets what is published from then on."
    ),
)
@with_access
def sub(
    class_: Annotated[Any, _CLASS],
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            min=1,
            metavar="COUNT",
            show_default="go on",
            help="End after so many messages. Further ones are left to the next subscriber.",
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Print each message's bytes as they are, and a line end. Otherwise control "
            "characters and what is no UTF-8 are shown as escapes such as \\n and \\xff.",
        ),
    ] = False,
    no_ack: Annotated[
        bool,
        typer.Option(
            "--no-ack",
            help="Acknowledge nothing: messages come again after the ack timeout, and to the next "
            "subscriber.",
        ),
    ] = False,
    channel: Annotated[
        list[str] | None,
        typer.Option(
            "--channel",
            parser=parse_pattern,
            metavar="PATTERN",
            show_default="all messages",
            help="Only messages on channels like this one: * stands for one segment, # at the end "
            "for any number of them. May be given several times.",
        ),
    ] = None,
    durable: Annotated[
        str | None,
        typer.Option(
            "--durable",
            metavar="NAME",
            show_default=False,
            help="Go on where the last subscriber of this name ended; the bus keeps the position.",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="NAME",
            show_default=False,
            help="Share the messages with all other subscribers of this group: each gets some.",
        ),
    ] = None,
    by_key: Annotated[
        bool,
        typer.Option(
            "--by-key",
            help="In a group: messages of one key go to one subscriber, one after the other.",
        ),
    ] = False,
    start: Annotated[
        Any,
        typer.Option(
            "--start",
            parser=parse_start,
            metavar="WHERE",
            help="Begin with what waits for a first subscriber (waiting), with the next message "
            "(new), the oldest or the newest one there (earliest, last), the last message of each "
            "channel (last_values), a sequence, or a time such as 2026-01-31T08:00.",
        ),
    ] = "waiting",
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            "--max-in-flight",
            min=1,
            metavar="COUNT",
            show_default="as the bus says",
            help="Be sent so many messages at most that are not acknowledged.",
        ),
    ] = None,
    ack_seconds: Annotated[
        float | None,
        typer.Option(
            "--ack-seconds",
            parser=parse_seconds,
            metavar="SECONDS",
            show_default="as the bus says",
            help="How long a message may be unacknowledged before it comes again.",
        ),
    ] = None,
    max_deliveries: Annotated[
        int | None,
        typer.Option(
            "--max-deliveries",
            min=0,
            max=DELIVERIES_MAX,
            metavar="COUNT",
            show_default="as the bus says",
            help="How often a message comes before it is given up. 0 for without end.",
        ),
    ] = None,
    backoff: Annotated[
        Any,
        typer.Option(
            "--backoff",
            parser=parse_pauses,
            metavar="SECONDS,…",
            show_default="as the bus says",
            help="Pauses before a message comes the second time, the third and so on: 1,5,30.",
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
app.command(rich_help_panel=_LOOK_AFTER, help=top.HELP)(with_access(top.top))
app.command(rich_help_panel=_LOOK_AFTER, help=explain.HELP)(with_access(explain.explain))
app.add_typer(dlq.app, name="dlq", rich_help_panel=_LOOK_AFTER)
app.command(rich_help_panel=_LOOK_AFTER, help=forget.HELP)(with_access(forget.forget))
app.add_typer(journal.app, name="journal", rich_help_panel=_LOOK_AFTER)
app.command(rich_help_panel=_JOIN, help=bridge.HELP)(bridge.bridge)
app.command(rich_help_panel=_JOIN, help=gateway.HELP)(gateway.gateway)


@app.command(
    rich_help_panel=_USE,
    help=(
        "Measure how fast the bus is on this machine.\n\n"
        "A publisher and subscribers, in processes of their own, pass messages through a server "
        "that is started for it, or the one at --url. Every message is stored, delivered and "
        "acknowledged; every id and every byte is checked before a rate is printed. Then messages "
        "go one at a time, for the latency.\n\n\b\n"
        "  simplebus bench\n"
        "  simplebus bench --messages 10000000 --size 16 --subscribers 2"
    ),
)
@with_access
def bench(
    messages: Annotated[
        int,
        typer.Option("--messages", min=1, metavar="COUNT", help="How many messages to publish."),
    ] = 2_000_000,
    size: Annotated[
        int,
        typer.Option(
            "--size",
            parser=parse_size,
            metavar="SIZE",
            show_default="128",
            help="How long each message is, at least 16 bytes.",
        ),
    ] = 128,
    subscribers: Annotated[
        int,
        typer.Option(
            "--subscribers",
            min=1,
            metavar="COUNT",
            help="How many subscribers each message goes to.",
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
            show_default="a server of its own",
            help="Use the bus that listens there, as simplebus://HOST:PORT.",
        ),
    ] = None,
    class_id: Annotated[
        int,
        typer.Option(
            "--class",
            min=0,
            max=CLASS_ID_MAX - 1,
            metavar="CLASS",
            help="Use this class and the next one. Nobody else may use them meanwhile.",
        ),
    ] = 65000,
) -> None:
    import trio

    from simplebus.bench.run import Plan, measure

    try:
        plan = Plan(messages=messages, size=size, subscribers=subscribers, class_id=class_id)
    except ValueError as error:
        fail(str(error), status=2)
    for line in trio.run(measure, plan, url):
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


# What goes wrong ---------------------------------------------------------------------------------


def main() -> None:
    """The entry point: `app`, with every foreseeable error as a sentence and an exit status."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # Standard input, output or error was closed: no socket is to be in its place.
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
            raise  # A bug of ours: its traceback is wanted.
        if isinstance(causes[0], BrokenPipeError):  # Whoever read what we print has read enough.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the flush at exit.
        else:
            typer.echo(f"simplebus: {describe_error(causes[0])}", err=True)
        sys.exit(MEMORY_STATUS if isinstance(causes[0], MemoryError) else 1)
