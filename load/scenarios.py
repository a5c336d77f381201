"""Table of scenarios: variants, comparisons and target values.

Every target compares within one round, so that a noisy machine affects both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from load import (
    attacks,
    bridge,
    connection_attack,
    connections,
    dotnet_client,
    durability,
    engine_kills,
    growing_backlog,
    holds,
    kills,
    memory,
    memory_limit,
    module_bus,
    monitor,
    nats_scaling,
    partitions,
    sdk,
    soak,
    spark,
    spark_heap,
    spark_kills,
    stalled_reader,
    tls_and_permissions,
)
from load.measure import Flow, RoundTrips, RunOptions, Work
from load.report import Row, Target
from load.single_messages import NATS_PY, Confirms, OneWay, Requests

FULL_S = 2.0  # Duration of one measurement of simplebus.
PEER_S = 1.0  # Duration of one measurement of a peer without a target.
PACE = 50_000  # Messages per second, which every peer can process.
CPU_PACES = {1_000: 4.0, 10_000: FULL_S, PACE: FULL_S, 0: FULL_S}
"""Messages a second, 0 for no limit, and the seconds of one measurement."""
ONE_WAY_PACE = 1_000
PYTHON_S = 4.0  # Long enough for a p99 of some thousand messages.
CONFIRMS_S = 1.0
IN_FLIGHT = 64
CONFIRMED = {"blocking": 2.0, "asyncio": 1.6, "trio": 1.6}
CONFIRMED_OS = {"blocking": 1.3, "asyncio": 1.3, "trio": 1.3}
CONFIRMED_MANY = {"asyncio": 3.0, "trio": 3.0}
"""Ratios to JetStream that are required of each client."""
ENVELOPES = Flow(size_bytes=128, channel="load.flow.1")


@dataclass(frozen=True)
class Variant:
    """Configuration measured in every round of a scenario."""

    name: str
    kind: str
    protocol: str
    """Protocol of the generator, or client of the Python programs."""
    work: Work
    seconds: float = FULL_S


@dataclass(frozen=True)
class Scenario:
    """Named measurement with its variants and targets, or with a function."""

    name: str
    title: str
    variants: tuple[Variant, ...] = ()
    targets: tuple[Target, ...] = ()
    special: Callable[[RunOptions], list[Row]] | None = None
    """Function that measures the scenario, instead of variants."""
    is_long: bool = False
    """True if the scenario runs only when it is named on the command line."""


def _simplebus(name: str, work: Work) -> Variant:
    return Variant(name, "simplebus", "simplebus", work)


def _version_2(name: str, work: Flow) -> Variant:
    return Variant(name, "simplebus", "simplebus-2", work)


def _nats(work: Work) -> Variant:
    return Variant("nats core", "nats", "nats", work)


def _simplebus_nats(work: Work) -> Variant:
    return Variant("simplebus", "simplebus-nats", "nats", work)


def _nats_flow(
    name: str, title: str, flow: Flow, at_least: float | None, reach: float | None
) -> Scenario:
    """Compare the NATS listener with nats-server, by the same bytes."""
    return Scenario(
        f"nats-{name}",
        f"NATS clients: {title}",
        (_simplebus_nats(flow), _nats(flow)),
        (Target(f"NATS, {title}", "simplebus", "nats core", at_least, reach),),
    )


def _peers(flow: Flow, seconds: float) -> tuple[Variant, ...]:
    """Return further peers, shown without a target."""
    return (
        Variant(
            "JetStream, acks of 500",
            "nats",
            "nats-jetstream",
            replace(flow, ack_every=500),
            seconds,
        ),
        Variant("JetStream, each acked", "nats", "nats-jetstream", flow, seconds),
        Variant("redis pub/sub", "redis", "redis", flow, seconds),
        Variant("redis stream + XACK", "redis", "redis-stream", flow, seconds),
    )


def _one_to_one(size_bytes: int, at_least: float, reach: float) -> Scenario:
    flow = Flow(size_bytes=size_bytes)
    title = f"{size_bytes} B, 1 to 1, against nats core"
    targets = [Target(title, "simplebus", "nats core", at_least, reach)]
    if size_bytes == 16:
        targets.append(
            Target(
                "broker CPU per 16 B message",
                "simplebus",
                None,
                0.25,
                0.09,
                quantity="cpu_us",
                unit="us",
                less_is_better=True,
            )
        )
    return Scenario(
        name=f"flow-{size_bytes}",
        title=f"{size_bytes} B, one publisher, one subscriber",
        variants=(_simplebus("simplebus", flow), _nats(flow), *_peers(flow, PEER_S)),
        targets=tuple(targets),
    )


def _journal(size_bytes: int) -> Scenario:
    """Compare durability levels of confirms. Each variant has its fastest kind of acks."""
    flow = Flow(size_bytes=size_bytes)
    files = replace(flow, ack_every=500, storage="file")
    title = f"{size_bytes} B, confirmed"
    return Scenario(
        f"journal-{size_bytes}",
        f"{size_bytes} B, one publisher that is told where its messages are, one subscriber",
        (
            _version_2("in memory", flow),
            Variant("with the system", "simplebus-os", "simplebus-2", flow),
            Variant("on disk", "simplebus-disk", "simplebus-2", flow),
            Variant("JetStream, file", "nats", "nats-jetstream", files, PEER_S),
            Variant("JetStream, file, synced", "nats-always", "nats-jetstream", files, PEER_S),
        ),
        (
            Target(f"{title} by the system against memory", "with the system", "in memory", 0.5, 1),
            Target(f"{title} on disk against memory", "on disk", "in memory", None, None),
            Target(
                f"{title} on disk against JetStream, synced",
                "on disk",
                "JetStream, file, synced",
                10,
                None,
            ),
            Target(
                f"{title} on disk against JetStream as it ships",
                "on disk",
                "JetStream, file",
                3,
                None,
            ),
        ),
    )


def _engine(size_bytes: int) -> Scenario:
    """Compare a stateless server before JetStream with JetStream itself.

    Both confirm each message after it is in a file, and each message is acked; one variant acks
    500 at
    once. With a publisher name each message has an id for deduplication. The stateless server
    removes
    acked messages; JetStream does so in one variant only.
    """
    flow = Flow(size_bytes=size_bytes, storage="file")
    at_once, with_ids = replace(flow, ack_every=500), replace(flow, name="load")
    removed = replace(at_once, retention="interest")
    title = f"{size_bytes} B, a stateless server before JetStream, against JetStream alone"
    return Scenario(
        f"engine-{size_bytes}",
        f"{size_bytes} B, one publisher, one subscriber, messages kept by JetStream in a file",
        (
            Variant("stateless server", "simplebus-engine", "simplebus-2", flow),
            Variant("JetStream, each acked", "nats", "nats-jetstream", flow),
            Variant("JetStream, acks of 500", "nats", "nats-jetstream", at_once),
            Variant("JetStream, acks of 500, removed", "nats", "nats-jetstream", removed),
            Variant("stateless server, with ids", "simplebus-engine", "simplebus-2", with_ids),
            Variant("JetStream, with ids", "nats", "nats-jetstream", with_ids),
        ),
        (
            Target(f"{title}, each acked", "stateless server", "JetStream, each acked", 0.8, None),
            Target(
                f"{title}, acks of 500", "stateless server", "JetStream, acks of 500", 0.8, None
            ),
            Target(
                f"{title}, which removes acknowledged messages",
                "stateless server",
                "JetStream, acks of 500, removed",
                None,
                None,
            ),
            Target(
                f"{title}, with ids", "stateless server, with ids", "JetStream, with ids", 0.8, None
            ),
        ),
    )


def _latency_targets(
    of: str,
    against: str,
    *,
    p50: float | None = None,
    p50_reach: float | None = None,
    p99: float | None = None,
) -> tuple[Target, ...]:
    """Return the targets of p50 and p99; None only shows the value."""
    return tuple(
        Target(title, of, against, at_most, reach, quantity, less_is_better=True)
        for title, at_most, reach, quantity in (
            (f"{of}, p50, against {against}", p50, p50_reach, "p50_us"),
            (f"{of}, p99, against {against}", p99, None, "p99_us"),
        )
    )


def _python_variants(work: Work) -> tuple[Variant, ...]:
    """Return Python programs of both backends and of nats-py, which runs under asyncio only."""
    return (
        Variant("asyncio", "simplebus", "asyncio", work, PYTHON_S),
        Variant("nats-py", "nats", NATS_PY, work, PYTHON_S),
        Variant("trio", "simplebus", "trio", work, PYTHON_S),
    )


def _confirmed() -> Scenario:
    """Compare Python programs that wait for confirms with nats-py and JetStream."""
    many = f", {IN_FLIGHT} in flight"
    variants, targets = list[Variant](), list[Target]()
    for suffix, kind, peer, work, targets_by_client in (
        ("", "simplebus", "JetStream memory", Confirms(), CONFIRMED),
        (", os", "simplebus-os", "JetStream file", Confirms(storage="file"), CONFIRMED_OS),
        (many, "simplebus", f"JetStream{many}", Confirms(in_flight=IN_FLIGHT), CONFIRMED_MANY),
    ):
        for client, at_least in targets_by_client.items():
            of = client + suffix
            variants.append(Variant(of, kind, client, work, CONFIRMS_S))
            targets.append(Target(f"{of}, against {peer}", of, peer, at_least, None))
        variants.append(Variant(peer, "nats", NATS_PY, work, CONFIRMS_S))
    title = "Python programs that publish and wait for confirms"
    return Scenario("confirmed", title, tuple(variants), tuple(targets))


def _cpu() -> Scenario:
    """Compare the CPU time of brokers at even paces and at full speed.

    A paced generator writes once a millisecond: 1, 10 and 50 messages.
    """
    variants, targets = list[Variant](), list[Target]()
    for pace, seconds in CPU_PACES.items():
        flow, speed = Flow(pace=pace), f"{pace:,} a second" if pace else "full speed"
        of, peer = f"simplebus, {speed}", f"nats core, {speed}"
        variants.append(Variant(of, "simplebus", "simplebus", flow, seconds))
        variants.append(Variant(peer, "nats", "nats", flow, seconds))
        for against, unit in ((None, "us"), (peer, "x")):
            title = f"{of}, against nats core" if against else of
            spent = Target(title, of, against, None, None, "cpu_us", unit, less_is_better=True)
            targets.append(spent)
    title = "16 B, CPU time of the broker per message"
    return Scenario("cpu", title, tuple(variants), tuple(targets))


SCENARIOS = (
    _one_to_one(16, 4, 8),
    _one_to_one(128, 3, 5.5),
    _one_to_one(1024, 1.3, 1.8),
    Scenario(
        "fan-out",
        "16 B, one publisher, three subscribers that each get all",
        (
            _simplebus("simplebus", Flow(subscribers=3)),
            _nats(Flow(subscribers=3)),
            Variant("redis pub/sub", "redis", "redis", Flow(subscribers=3), PEER_S),
        ),
        (Target("16 B, 1 to 3, against nats core", "simplebus", "nats core", 4, 12),),
    ),
    Scenario(
        "v1-latency",
        "version 1: 16 B, one message in flight",
        (
            _simplebus("simplebus", RoundTrips()),
            _nats(RoundTrips()),
            Variant("redis pub/sub", "redis", "redis", RoundTrips(), PEER_S),
        ),
        _latency_targets("simplebus", "nats core", p50=1.2, p99=2),
    ),
    Scenario(
        "steady",
        f"16 B, {PACE:,} a second",
        (
            _simplebus("simplebus", Flow(pace=PACE)),
            _nats(Flow(pace=PACE)),
            *_peers(Flow(pace=PACE), FULL_S),
        ),
    ),
    _cpu(),
    Scenario(
        "classes",
        "16 B, two classes in turn, frame by frame",
        (
            _simplebus("one class", Flow()),
            _simplebus("two classes", Flow(classes=(1, 2))),
        ),
        (Target("two classes against one", "two classes", "one class", 0.5, 0.8),),
    ),
    Scenario(
        "mixed",
        "payloads of 1 to 300 B in turn",
        (
            _simplebus("128 B", Flow(size_bytes=128)),
            _simplebus("1 to 300 B", Flow(mixed=True)),
        ),
        (Target("mixed sizes against 128 B", "1 to 300 B", "128 B", 0.7, 0.9),),
    ),
    Scenario(
        "acks",
        "16 B, one ack frame a message",
        (
            _simplebus("ranges", Flow()),
            _simplebus("single, in order", Flow(acks="single")),
            _simplebus("single, shuffled", Flow(acks="random")),
        ),
        (
            Target("single acks in order against ranges", "single, in order", "ranges", 0.3, 0.6),
            Target("single acks shuffled against ranges", "single, shuffled", "ranges", 0.15, 0.4),
        ),
    ),
    Scenario(
        "angle",
        "16 B with a '<' in every payload",
        (
            _simplebus("plain", Flow()),
            _simplebus("with '<'", Flow(angle=True)),
        ),
        (Target("a '<' in every payload against none", "with '<'", "plain", None, None),),
    ),
    Scenario(
        "version-2",
        "128 B, versions 1 and 2 of the protocol",
        (
            _simplebus("version 1", Flow(size_bytes=128)),
            _version_2("version 2", Flow(size_bytes=128)),
            _version_2("envelopes", ENVELOPES),
            _version_2("bound to all", replace(ENVELOPES, binding="load.#")),
        ),
        (
            Target("version 2 against version 1", "version 2", "version 1", None, None),
            Target("version 2, envelopes, against version 1", "envelopes", "version 1", 0.6, 0.8),
            Target("the same, bound to all", "bound to all", "version 1", None, None),
        ),
    ),
    _nats_flow("16", "16 B, 1 to 1", Flow(), 1.5, 3),
    _nats_flow("128", "128 B, 1 to 1", Flow(size_bytes=128), 1.5, 3),
    _nats_flow("mixed", "1,000 subjects, 1 to 300 B", Flow(mixed=True, subjects=1_000), 0.5, 1),
    _nats_flow("fan-out", "16 B, 1 to 3", Flow(subscribers=3), None, None),
    Scenario(
        "nats-latency",
        "NATS clients: 16 B, one message in flight",
        (_simplebus_nats(RoundTrips()), _nats(RoundTrips())),
        _latency_targets("simplebus", "nats core", p50=2.5, p50_reach=1.3),
    ),
    Scenario("nats-idle", "idle NATS clients", special=nats_scaling.idle),
    Scenario("nats-matching", "many NATS subscriptions", special=nats_scaling.matching),
    _journal(16),
    _journal(128),
    _engine(16),
    _engine(128),
    Scenario("journal-latency", "time of a confirm", special=durability.latency),
    Scenario("backlog", "unacknowledged messages", special=durability.backlog),
    Scenario("growing-backlog", "a bystander of a growing class", special=growing_backlog.run),
    Scenario("memory-limit", "a server without memory", special=memory_limit.run, is_long=True),
    Scenario("kills", "servers killed under load", special=kills.run, is_long=True),
    Scenario(
        "engine-kills",
        "a JetStream cluster and its stateless servers, killed under load",
        special=engine_kills.run,
        is_long=True,
    ),
    Scenario(
        "spark-kills",
        "drivers, JVMs, Python workers and buses of Spark queries, killed under load",
        special=spark_kills.run,
        is_long=True,
    ),
    Scenario(
        "spark-heap",
        "many rows from a bus to an archive and back, through a small heap",
        special=spark_heap.run,
        is_long=True,
    ),
    Scenario(
        "partitions",
        "bridges over a lossy network with outages and killed servers",
        special=partitions.run,
        is_long=True,
    ),
    Scenario("soak", "random work, and growth of memory", special=soak.run, is_long=True),
    Scenario("connections", "ten thousand connections", special=connections.run),
    Scenario("monitor", "cost of metrics and the live page", special=monitor.run),
    Scenario("tls", "128 B over TLS 1.3", special=tls_and_permissions.tls),
    Scenario("permissions", "cost of permissions", special=tls_and_permissions.permissions),
    Scenario("attack", "an attack on a server under load", special=connection_attack.run),
    Scenario("attacks", "one client with many legal requests", special=attacks.run),
    Scenario("holds", "longest holds of the event loop by any request", special=holds.run),
    Scenario("bridge", "from bus to bus, and to NATS", special=bridge.run),
    Scenario("sdk", "Python programs, beside those of nats-py", special=sdk.run),
    Scenario(
        "requests",
        "Python programs: requests, one in flight",
        _python_variants(Requests()),
        (
            *_latency_targets("asyncio", "nats-py", p50=1.3, p50_reach=1.0),
            *_latency_targets("trio", "nats-py"),
        ),
    ),
    _confirmed(),
    Scenario(
        "one-way",
        f"Python programs: {ONE_WAY_PACE:,} messages a second, one way",
        _python_variants(OneWay(ONE_WAY_PACE)),
        (
            *_latency_targets("asyncio", "nats-py", p50=1.2),
            *_latency_targets("trio", "nats-py", p50=1.2),
        ),
    ),
    Scenario("dotnet", "the .NET client beside the Python SDK", special=dotnet_client.speed),
    Scenario(
        "dotnet-kills",
        "servers killed under .NET programs",
        special=dotnet_client.kills,
        is_long=True,
    ),
    Scenario("v1-stall", "a client that stops reading", special=stalled_reader.run),
    Scenario("modules", "modules of one process", special=module_bus.run),
    Scenario("memory", "memory of the server", special=memory.run),
    Scenario("spark", "into Spark and out of it, beside Parquet files", special=spark.run),
)
