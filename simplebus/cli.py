"""The command line: options in, one call out.

Rule 1: nothing heavy is imported here. A command imports what it runs, so that help is instant.
Rule 2: every option says what it bounds and what happens there, and has an environment variable.
Rule 3: what goes wrong is one sentence on standard error and an exit status, never a traceback:
2 for values that make no sense, 1 for everything else, 130 for Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated, NoReturn

import typer

from simplebus.core.errors import BusError
from simplebus.core.limits import CLASS_ID_MAX
from simplebus.options import (
    ACKNOWLEDGEMENT,
    DEFAULT,
    DRAIN_SECONDS,
    HOSTS,
    MEMORY,
    PATIENCE,
    Full,
    LogLevel,
    option,
    parse_size,
    parse_url,
    seconds_option,
    settings,
    show_size,
    size_option,
)

URL = "simplebus://127.0.0.1:8888"

_FROM_ENVIRONMENT = (
    "Each option can be set by an environment variable too: --port by SIMPLEBUS_PORT, and so on."
)

app = typer.Typer(
    name="simplebus",
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
        "Messages are published to a class, a number from 0 to 65535. Every subscriber of the "
        "class gets each of them, in order, and again until it has acknowledged it."
    ),
)


# Options ------------------------------------------------------------------------------------------

_CLASS_ID = typer.Argument(
    min=0,
    max=CLASS_ID_MAX,
    metavar="CLASS",
    show_default=False,
    help="The class of messages, a number from 0 to 65535.",
)
_URL = option(
    "--url",
    "Where the bus listens, as simplebus://HOST:PORT.",
    metavar="URL",
    parser=parse_url,
    show_default=URL,
)


# Commands ----------------------------------------------------------------------------------------


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"simplebus {version('simplebus')}")
        except PackageNotFoundError:
            typer.echo("simplebus, run from its source without being installed")
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
    help=(
        "Run the bus.\n\n"
        "It prints one line when it is ready, [bold]simplebus ready tcp=HOST:PORT[/bold], and "
        "serves until it is told to stop. Messages live in memory and end with the server."
        "\n\n\b\n"
        "  simplebus serve\n"
        "  simplebus serve --host 0.0.0.0 --max-memory 4GiB --verbose\n\n" + _FROM_ENVIRONMENT
    )
)
def serve(
    context: typer.Context,
    host: Annotated[
        list[str] | None,
        option(
            "--host",
            "An address or name to listen on; give it again for more than one. By default only "
            "programs on this machine can connect. 0.0.0.0 opens the bus to the network, where "
            "it asks nobody for a password.",
            metavar="ADDRESS",
            show_default="127.0.0.1 and ::1",
        ),
    ] = None,
    port: Annotated[
        int,
        option(
            "--port",
            "The TCP port. 0 picks a free one; the ready line tells which.",
            min=0,
            max=65535,
            metavar="PORT",
        ),
    ] = 8888,
    ack_timeout: Annotated[
        int,
        option(
            "--ack-timeout",
            "Ticks after which a message that its subscriber has not acknowledged is sent again; "
            "each further pause is twice as long. Some clients acknowledge 1.5 seconds late, so "
            "stay above 2 seconds.",
            panel=ACKNOWLEDGEMENT,
            metavar="TICKS",
        ),
    ] = 6,
    tick: Annotated[
        float,
        seconds_option(
            "--tick", "How long a tick is, the beat of the ack timer.", 1.0, panel=ACKNOWLEDGEMENT
        ),
    ] = 1.0,
    full: Annotated[
        Full,
        option(
            "--full",
            "What happens to a message for a class that is at one of its limits. block: its "
            "publisher waits, nothing is lost. drop_oldest: the oldest message makes room. "
            "drop_newest: it is dropped itself. What is dropped is counted.",
            panel=MEMORY,
            metavar="POLICY",
        ),
    ] = Full.BLOCK,
    max_memory: Annotated[
        int,
        size_option(
            "--max-memory",
            "Memory that the messages of all classes together may take. At this limit no class "
            "grows any more, and --full decides.",
            show_size(DEFAULT.total_bytes),
        ),
    ] = DEFAULT.total_bytes,
    max_class_memory: Annotated[
        int | None,
        size_option(
            "--max-class-memory",
            "Memory that the messages of one class may take. At this limit --full decides.",
            f"{show_size(DEFAULT.class_bytes)}, at most --max-memory",
        ),
    ] = None,
    max_class_messages: Annotated[
        int,
        option(
            "--max-class-messages",
            "Messages that one class may hold. At this limit --full decides.",
            panel=MEMORY,
            metavar="COUNT",
        ),
    ] = DEFAULT.class_messages,
    max_frame: Annotated[
        int | None,
        size_option(
            "--max-frame",
            "The longest message accepted, with its 13 bytes of framing. Who sends a longer one is "
            "disconnected.",
            f"{show_size(DEFAULT.frame_bytes)}, at most half of --max-class-memory",
        ),
    ] = None,
    max_pending: Annotated[
        int | None,
        size_option(
            "--max-pending",
            "Memory kept for one connection beside the classes: messages that wait for room, "
            "answers that its peer has not taken. Who needs more is disconnected.",
            f"{show_size(DEFAULT.pending_bytes)}, at least --max-frame and 512KiB",
        ),
    ] = None,
    max_connections: Annotated[
        int,
        option(
            "--max-connections",
            "Connections open at once. One more is closed as soon as it comes.",
            metavar="COUNT",
        ),
    ] = DEFAULT.connections,
    max_classes: Annotated[
        int,
        option(
            "--max-classes",
            "Classes in use. Who asks for one more is disconnected.",
            metavar="COUNT",
        ),
    ] = DEFAULT.classes,
    hello_timeout: Annotated[
        float,
        seconds_option(
            "--hello-timeout",
            "How long a fresh connection may say nothing before it is closed.",
            DEFAULT.hello_seconds,
            panel=PATIENCE,
        ),
    ] = DEFAULT.hello_seconds,
    frame_timeout: Annotated[
        float,
        seconds_option(
            "--frame-timeout",
            "How long a message may be under way, from its first byte to its last, before its "
            "sender is disconnected.",
            DEFAULT.frame_seconds,
            panel=PATIENCE,
        ),
    ] = DEFAULT.frame_seconds,
    stall_timeout: Annotated[
        float,
        seconds_option(
            "--stall-timeout",
            "How long a subscriber that holds back a full class may take nothing before it is "
            "disconnected.",
            DEFAULT.stall_seconds,
            panel=PATIENCE,
        ),
    ] = DEFAULT.stall_seconds,
    drain_timeout: Annotated[
        float,
        seconds_option(
            "--drain-timeout",
            "How long a server that was told to stop, by SIGTERM or Ctrl-C, waits for subscribers "
            "to take and acknowledge what is stored for them. What is left then is lost, and the "
            "log says so. A second signal stops at once.",
            DRAIN_SECONDS,
            panel=PATIENCE,
        ),
    ] = DRAIN_SECONDS,
    verbose: Annotated[
        bool,
        option("--verbose", "Print a line of rates every second, on standard error."),
    ] = False,
    log_level: Annotated[
        LogLevel,
        option(
            "--log-level",
            "Log on standard error from this level up: debug, info, warning or error.",
            metavar="LEVEL",
        ),
    ] = LogLevel.INFO,
) -> None:
    import socket
    from functools import partial

    import trio

    from simplebus.server.serve import ServeOptions, configure_logging
    from simplebus.server.serve import serve as serve_until_stopped

    try:
        chosen = settings(**context.params)
    except ValueError as error:
        fail(str(error), status=2)
    configure_logging(log_level)
    hosts = tuple(dict.fromkeys(host or HOSTS))
    options = ServeOptions(hosts=hosts, port=port, drain_seconds=drain_timeout, verbose=verbose)
    try:
        trio.run(partial(serve_until_stopped, chosen, options, announce=_announce))
    except socket.gaierror as error:
        fail(f"cannot listen on {' or '.join(hosts)}: {sentence(error)}")


def _announce(line: str) -> None:
    """The ready line is all that a script has to read; the rest is for people. Whether anybody
    still reads is not the server's concern."""
    stream = sys.stdout if line.startswith("simplebus ready ") else sys.stderr
    with contextlib.suppress(OSError):
        print(line, file=stream, flush=True)


@app.command(
    help=(
        "See the bus at work: ten seconds, real processes, nothing to set up.\n\n"
        "A server, a publisher and two subscribers are started on this machine. One subscriber "
        "stops acknowledging for a while, the other is killed with messages in flight and comes "
        "back. At the end everything that was sent is compared with everything that was received, "
        "and the exit status is 0 only if nothing was lost, misplaced or damaged.\n\n\b\n"
        "  simplebus demo"
    )
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


@app.command(
    help=(
        "Publish messages.\n\n\b\n"
        "  simplebus pub 1 hello world              two messages\n"
        "  tail -f app.log | simplebus pub 1        a message for each line\n"
        "  simplebus pub 1 --count 1000000          generated ones\n\n"
        "Messages that nobody has subscribed to yet wait for the class's first subscriber."
    )
)
def pub(
    class_id: Annotated[int, _CLASS_ID],
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
    url: Annotated[str, _URL] = URL,
) -> None:
    if text and count is not None:
        fail("give texts or --count, not both", status=2)
    from functools import partial

    import trio

    from simplebus import pipes

    if count is not None:
        job = partial(pipes.publish_generated, url, class_id, count=count, size=size, rate=rate)
    elif text:
        job = partial(pipes.publish_texts, url, class_id, text)
    else:
        if sys.stdin.isatty():
            typer.echo("Each line is a message. Ctrl-D ends.", err=True)
        job = partial(pipes.publish_input, url, class_id)
    sent = trio.run(job)
    typer.echo(f"{sent:,} message{'' if sent == 1 else 's'} sent to class {class_id}", err=True)


@app.command(
    help=(
        "Print the messages of a class, a line each, and acknowledge them.\n\n\b\n"
        "  simplebus sub 1\n"
        "  simplebus sub 1 --count 10 --raw > ten-messages\n\n"
        "It ends with Ctrl-C. The first subscriber of a class gets what is waiting there; a "
        "further one gets what is published from then on."
    )
)
def sub(
    class_id: Annotated[int, _CLASS_ID],
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
    url: Annotated[str, _URL] = URL,
) -> None:
    from functools import partial

    import trio

    from simplebus import pipes

    ended_by = trio.run(
        partial(pipes.print_messages, url, class_id, count=count, raw=raw, ack=not no_ack)
    )
    if ended_by is not None:
        raise typer.Exit(128 + ended_by)


@app.command(
    help=(
        "Measure how fast the bus is on this machine.\n\n"
        "A publisher and subscribers, in processes of their own, pass messages through a server "
        "that is started for it, or the one at --url. Every message is stored, delivered and "
        "acknowledged; every id and every byte is checked before a rate is printed. Then messages "
        "go one at a time, for the latency.\n\n\b\n"
        "  simplebus bench\n"
        "  simplebus bench --messages 10000000 --size 16 --subscribers 2"
    )
)
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


@app.command(
    "systemd-unit",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help=(
        "Print a systemd unit that runs this installation.\n\n"
        "Options of [bold]simplebus serve[/bold] may follow; they become part of it.\n\n\b\n"
        "  simplebus systemd-unit > /etc/systemd/system/simplebus.service\n"
        "  simplebus systemd-unit --host 0.0.0.0 --max-memory 4GiB"
    ),
)
def systemd_unit(context: typer.Context) -> None:
    from simplebus.unit import complaints, installation, unit

    command = typer.main.get_group(app).commands["serve"]
    with command.make_context("simplebus serve", list(context.args)) as given:
        values = given.params
    try:
        settings(**values)
    except ValueError as error:
        fail(str(error), status=2)
    places = installation()
    for complaint in complaints(places):
        typer.echo(f"simplebus: {complaint}", err=True)
    text = unit(
        context.args,
        port=values["port"],
        drain_seconds=values["drain_timeout"],
        connections=values["max_connections"],
        installed_in=places,
    )
    typer.echo(text, nl=False)


# What goes wrong ---------------------------------------------------------------------------------


def fail(text: str, *, status: int = 1) -> NoReturn:
    """Say it on standard error and end the command."""
    typer.echo(f"simplebus: {text}", err=True)
    raise typer.Exit(status)


def sentence(error: BaseException) -> str:
    """What an error says, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group of errors, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in leaves(part)]
    return [error]


def main() -> None:
    """The entry point: `app`, with every foreseeable error as a sentence and an exit status."""
    try:
        app(prog_name="simplebus")
    except (BaseExceptionGroup, BusError, OSError, KeyboardInterrupt) as error:
        causes = leaves(error)
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            sys.exit(130)
        if not all(isinstance(cause, (BusError, OSError)) for cause in causes):
            raise  # A bug of ours: its traceback is wanted.
        if isinstance(causes[0], BrokenPipeError):  # Whoever read what we print has read enough.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the flush at exit.
        else:
            typer.echo(f"simplebus: {sentence(causes[0])}", err=True)
        sys.exit(1)
