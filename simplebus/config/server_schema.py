"""The settings of the server.

Options, environment variables, the keys of the file, the sample file, the reference page and the
effect of a reload are derived from these tables. A new setting is one field here, and its use.
Defaults of limits are those of the core.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from simplebus.config.parse import (
    HOSTS,
    LogFormat,
    LogLevel,
    format_size,
    parse_binding,
    parse_host,
    parse_last_values,
    parse_server,
    parse_servers,
)
from simplebus.config.setting import (
    CLASS_ID,
    COUNT,
    FILE,
    FLAG,
    PORT,
    RATE,
    SECONDS,
    SIZE,
    TEXT,
    Kind,
    Setting,
    SettingsTable,
    choice,
)
from simplebus.core.limits import Limits
from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import ClassSettings, FullPolicy, Retention, Settings
from simplebus.nats.limits import NatsLimits

if TYPE_CHECKING:
    from simplebus.core.protocol.requests import NamedClass
    from simplebus.net.nats_connection import NatsAddress

_LOOPBACK = " and ".join(HOSTS)
LIMITS = Limits()
NATS_LIMITS = NatsLimits()

_HOST = Kind("text", "ADDRESS", parse_host)
_CLASS = Kind("text", "CLASS", parse_last_values, (int, str))
_BINDING = Kind("text", "SUBJECT=CLASS", parse_binding)
_SERVER = Kind("text", "HOST:PORT", parse_server)
_SERVERS = Kind("text", "SERVERS", parse_servers)
_DIRECTORY = replace(FILE, metavar="DIRECTORY")
_STORAGE = replace(TEXT, metavar="KIND")
_TICKS = replace(COUNT, metavar="TICKS", unit="ticks")
_CONNECTION_RATE = replace(RATE, unit="connections per second")
_MESSAGE_RATE = replace(RATE, unit="messages per second")
_BYTE_RATE = replace(SIZE, unit="bytes per second")


@dataclass(frozen=True)
class GeneralSettings(SettingsTable):
    """Binary listener, connections and logging."""

    IS_RELOADABLE = True

    host: tuple[str, ...] = _HOST.setting(
        "Address or host name to listen on. Repeat the option for more addresses. By default only "
        "programs on this machine can connect. 0.0.0.0 opens the server to the network, without a "
        "password unless users are configured.",
        default_text=_LOOPBACK,
        is_list=True,
        needs_restart=True,
    )
    port: int = PORT.setting(
        "TCP port of the binary protocol. 0 picks a free port, which the ready line shows.",
        default=8888,
        needs_restart=True,
    )
    max_connections: int = COUNT.setting(
        "Maximum number of open connections. Further connections are closed at once.",
        sets=(Limits, "connections"),
    )
    max_subscriptions: int = COUNT.setting(
        "Maximum number of subscriptions of one version 2 connection. Further subscriptions are "
        "refused.",
        sets=(Limits, "subscriptions"),
    )
    max_durables: int = COUNT.setting(
        "Maximum number of durables and groups of one class. Further ones are refused.",
        sets=(Limits, "durables"),
    )
    max_classes: int = COUNT.setting(
        "Maximum number of classes in use. A client that needs a further class is refused.",
        sets=(Limits, "classes"),
    )
    declare_only: bool = FLAG.setting(
        "Refuse classes that the file does not declare, such as misspelled ones. Only users with "
        "the right configure can create further classes.",
        sets=(Settings, "declare_only"),
    )
    verbose: bool = FLAG.setting(
        "Print message rates to standard error once a second.", needs_restart=True
    )
    log_level: LogLevel = choice(LogLevel, "LEVEL").setting(
        "Lowest level of events to log on standard error: debug, info, warning or error.",
        default=LogLevel.INFO,
    )
    log_format: LogFormat = choice(LogFormat, "FORMAT").setting(
        "Format of a log event: a line of text (console) or a JSON object with named fields on one "
        "line (json). text is the old name of console. Console lines for the systemd journal begin "
        "with their priority and have no time.",
        default=LogFormat.CONSOLE,
    )


@dataclass(frozen=True)
class AcknowledgementSettings(SettingsTable):
    """Redelivery of unacknowledged messages."""

    PANEL = "Acknowledgement"
    IS_RELOADABLE = True

    ack_timeout: int = _TICKS.setting(
        "Ticks after which an unacknowledged message is redelivered; each further delay is twice "
        "as long. Some clients acknowledge 1.5 seconds late, so set more than 2 seconds.",
        sets=(Settings, "ack_timeout"),
        needs_restart=True,
    )
    tick: float = SECONDS.setting(
        "Length of a tick of the ack timer.",
        sets=(Settings, "tick_seconds"),
        needs_restart=True,
    )
    max_deliveries: int = COUNT.setting(
        "Number of deliveries after which an unacknowledged message becomes a dead letter. 0 sets "
        "no limit.",
        sets=(Settings, "deliveries_max"),
    )


@dataclass(frozen=True)
class MemorySettings(SettingsTable):
    """Memory of classes and connections, and retention."""

    PANEL = "Memory"
    IS_RELOADABLE = True

    full: FullPolicy = choice(FullPolicy, "POLICY").setting(
        "Policy for a new message when its class is full. block: the publisher waits and no "
        "message is lost. drop_oldest: the oldest message is dropped. drop_newest: the new message "
        "is dropped. Dropped messages are counted. spill: the oldest messages are moved from "
        "memory to --data-dir and read back when a subscription needs them.",
        sets=(Settings, "full_policy"),
    )
    max_memory: int = SIZE.setting(
        "Maximum memory for the messages of all classes together. At this limit no class grows, "
        "and --full applies.",
        sets=(Limits, "total_bytes"),
    )
    max_class_memory: int | None = SIZE.setting(
        "Maximum memory for the messages of one class. At this limit --full applies.",
        sets=(Limits, "class_bytes"),
        default=None,
        default_text=f"{format_size(LIMITS.class_bytes)}, at most --max-memory",
        why_bounded="a class may not take more than --max-memory, which all classes share",
    )
    max_dead_letters: int = SIZE.setting(
        "Maximum memory for the dead letters of one class. At this limit the oldest are dropped. "
        "All dead letters together take at most a quarter of --max-memory.",
        sets=(Limits, "dead_letter_bytes"),
    )
    max_class_messages: int = COUNT.setting(
        "Maximum number of messages in one class. At this limit --full applies.",
        sets=(Limits, "class_messages"),
    )
    max_frame: int | None = SIZE.setting(
        "Maximum size of a message, including its 13 bytes of framing. The server disconnects a "
        "client that sends a longer message.",
        sets=(Limits, "frame_bytes"),
        default=None,
        default_text=f"{format_size(LIMITS.frame_bytes)}, at most half of --max-class-memory",
        why_bounded="a frame may take at most half of --max-class-memory",
        needs_restart=True,
    )
    max_pending: int | None = SIZE.setting(
        "Maximum memory for one connection outside the classes: messages that wait for space, and "
        "replies that its peer has not read. Above it, the connection is closed.",
        sets=(Limits, "pending_bytes"),
        default=None,
        default_text=f"{format_size(LIMITS.pending_bytes)}, at least --max-frame and 512KiB",
        why_bounded="a whole frame of --max-frame and one read must fit into it",
    )
    max_total_pending: int | None = SIZE.setting(
        "The same limit for all connections together. Above it, the connections that use the most "
        "memory are closed.",
        sets=(Limits, "total_pending_bytes"),
        default=None,
        default_text=f"{format_size(LIMITS.total_pending_bytes)}, at least --max-pending",
        why_bounded="one connection may take --max-pending of it",
    )
    max_credit: int = SIZE.setting(
        "Maximum size of the messages that a version 2 publisher may send before they are "
        "confirmed.",
        sets=(Limits, "credit_bytes"),
        needs_restart=True,
    )
    keep_messages: int = COUNT.setting(
        "Number of acknowledged messages to keep per class, for subscriptions that start earlier. "
        "The oldest are released first. 0 keeps none.",
        sets=(Retention, "messages"),
    )
    keep_memory: int = SIZE.setting(
        "Size of the acknowledged messages to keep per class. With --keep-messages or "
        "--keep-seconds, the limit that is reached first applies. 0 sets no limit.",
        sets=(Retention, "bytes"),
    )
    keep_seconds: float = SECONDS.setting(
        "Time to keep the acknowledged messages of a class. 0 sets no limit.",
        sets=(Retention, "seconds"),
    )
    last_values: tuple[NamedClass, ...] = _CLASS.setting(
        "Class that keeps the last message of each channel after it is acknowledged, for "
        "subscriptions that start with the last values. Repeat the option for more classes.",
        example='["state"]',
        is_list=True,
    )


@dataclass(frozen=True)
class TimeoutSettings(SettingsTable):
    """Timeouts of connections and of the shutdown."""

    PANEL = "Timeouts"
    IS_RELOADABLE = True

    hello_timeout: float = SECONDS.setting(
        "Time until a new connection that has sent nothing is closed.",
        sets=(Limits, "hello_seconds"),
    )
    frame_timeout: float = SECONDS.setting(
        "Maximum time between the first and the last byte of a message. The server disconnects a "
        "sender that takes longer.",
        sets=(Limits, "frame_seconds"),
    )
    stall_timeout: float = SECONDS.setting(
        "Time until a subscriber that reads nothing is disconnected, if a full class waits for it.",
        sets=(Limits, "stall_seconds"),
    )
    drain_timeout: float = SECONDS.setting(
        "Maximum time that the server waits after SIGTERM or Ctrl-C for subscribers to receive and "
        "acknowledge stored messages. Without --data-dir, the remaining messages are lost and "
        "logged. A second signal stops the server at once.",
        default=10.0,
    )
    idle_class_timeout: float = SECONDS.setting(
        "Time until a class is removed that has no messages, subscriptions, durables and bound "
        "subjects, that no connected client has named, and that the file does not declare. 0 "
        "keeps all classes.",
        sets=(Settings, "idle_class_seconds"),
    )
    heartbeat: float = SECONDS.setting(
        "Time of silence after which each side of a version 2 connection sends a heartbeat. After "
        "three times as long the connection is closed. 0 turns heartbeats off.",
        sets=(Settings, "heartbeat_seconds"),
    )


@dataclass(frozen=True)
class DurabilitySettings(SettingsTable):
    """Journal."""

    PANEL = "Durability"

    data_dir: Path | None = _DIRECTORY.setting(
        "Directory of the journal, which keeps messages, durables and dead letters across "
        "restarts. It is created if missing. Only one server can use it at a time.",
        default_text="no journal",
        example='"/var/lib/simplebus"',
    )
    durability: Durability = choice(Durability, "LEVEL").setting(
        "With --data-dir, how safely a message is stored before it is confirmed. disk: synced to "
        "disk, so that it survives a power failure. os: written to the operating system, so that "
        "it survives a server crash. memory: in the memory of the server, which writes it soon.",
        default=Durability.DISK,
    )


@dataclass(frozen=True)
class EngineSettings(SettingsTable):
    """JetStream cluster that stores the messages of a stateless server."""

    PANEL = "Messages in a JetStream cluster"

    engine: tuple[NatsAddress, ...] | None = _SERVERS.setting(
        "NATS servers with JetStream, as nats://HOST:PORT,nats://HOST:PORT. The cluster stores all "
        "messages, and any number of stateless servers can use it; see protocol/engine.md for the "
        "differences.",
        default_text="store messages in this server",
        example='"nats://10.0.0.1,nats://10.0.0.2,nats://10.0.0.3"',
    )
    engine_prefix: str = TEXT.setting(
        "Prefix of the stream names. Servers with the same prefix form one bus.",
        default="simplebus",
    )
    engine_replicas: int = COUNT.setting(
        "Number of cluster servers that store each message, from 1 to 5.", default=1
    )
    engine_storage: str = _STORAGE.setting(
        "Storage of the streams: file or memory.", default="file"
    )
    engine_ack_wait: float = SECONDS.setting(
        "Time until the messages in flight of a server that has failed are redelivered by other "
        "servers.",
        default=30.0,
    )
    engine_duplicates: float = SECONDS.setting(
        "Time during which the cluster detects a message that is published twice.",
        default=120.0,
    )
    engine_max_bytes: int = SIZE.setting(
        "Maximum size of the messages of one class in the cluster. At this limit publishers wait.",
        default=0,
        default_text="no limit",
    )
    engine_ca: Path | None = FILE.setting(
        "PEM file of the certificate authorities that may sign the cluster's certificates.",
        default_text="the system's authorities",
        example='"/etc/simplebus/cluster.pem"',
    )


@dataclass(frozen=True)
class BindSettings(SettingsTable):
    """Classes of NATS subjects."""

    PANEL = "NATS"
    IS_RELOADABLE = True

    bind: tuple[NamedClass, ...] = _BINDING.setting(
        "Store messages that NATS clients publish on a subject in a class, until the class's "
        "subscribers have acknowledged them: [bold]orders.>=7[/bold], or "
        "[bold]orders.>=orders[/bold] by name. Repeat the option for more bindings.",
        example='["orders.>=orders"]',
        is_list=True,
    )
    no_nats: bool = FLAG.setting("Do not open the port for NATS clients.", needs_restart=True)


@dataclass(frozen=True)
class NatsSettingsTable(SettingsTable):
    """NATS listener."""

    TOML_TABLE = "nats"
    OPTION_PREFIX = "nats_"
    PANEL = "NATS"
    IS_RELOADABLE = True

    port: int | None = PORT.setting(
        "TCP port for NATS clients. 0 picks a free port, which the ready line shows.",
        default_text="4222, or 0 with --port 0",
        needs_restart=True,
    )
    connect_url: tuple[str, ...] = _SERVER.setting(
        "Address of a server that NATS clients may use instead of this one, such as another one "
        "with the same --engine. Clients learn the addresses when they connect, and use them when "
        "they reconnect. Repeat the option for more servers.",
        example='["nats-2.example.com:4222"]',
        is_list=True,
    )
    max_payload: int = SIZE.setting(
        "Maximum size of a message from a NATS client, including headers. The server disconnects a "
        "client that sends a longer one.",
        sets=(NatsLimits, "max_payload"),
    )
    max_control_line: int = SIZE.setting(
        "Maximum size of a protocol line from a NATS client, without payload. The server "
        "disconnects a client that sends a longer one.",
        sets=(NatsLimits, "max_control_line"),
    )
    max_subs: int = COUNT.setting(
        "Maximum number of subscriptions of one NATS client. Further subscriptions are refused. 0 "
        "sets no limit.",
        sets=(NatsLimits, "max_subs"),
    )
    max_pending: int | None = SIZE.setting(
        "Maximum size of the unsent data of one NATS client. Above it, the client is a slow "
        "consumer and is disconnected.",
        sets=(NatsLimits, "max_pending"),
        default=None,
        default_text=f"{format_size(NATS_LIMITS.max_pending)}, at least --nats-max-payload",
        why_bounded="a message of --nats-max-payload must fit into it",
    )
    max_connections: int = COUNT.setting(
        "Maximum number of connected NATS clients. Further clients receive an error and are "
        "disconnected.",
        sets=(NatsLimits, "connections"),
    )
    ping_interval: float = SECONDS.setting(
        "Time of silence after which the server sends PING to a NATS client.",
        sets=(NatsLimits, "ping_seconds"),
    )
    max_pings_out: int = COUNT.setting(
        "Maximum number of PINGs without an answer. The server then disconnects the NATS client.",
        sets=(NatsLimits, "pings_max"),
    )
    auth_timeout: float = SECONDS.setting(
        "Maximum time for a NATS client to authenticate, if users are configured.",
        sets=(NatsLimits, "auth_seconds"),
    )
    write_timeout: float = SECONDS.setting(
        "Time until a NATS client that reads nothing is disconnected, if data waits for it.",
        sets=(NatsLimits, "write_seconds"),
    )
    lame_duck_grace: float = SECONDS.setting(
        "Time for NATS clients to disconnect by themselves after SIGUSR2 (lame duck mode).",
        sets=(NatsLimits, "lame_duck_grace_seconds"),
    )
    lame_duck_time: float = SECONDS.setting(
        "Period over which the server then disconnects the remaining NATS clients, one by one.",
        sets=(NatsLimits, "lame_duck_seconds"),
    )


@dataclass(frozen=True)
class CertificateSettings(SettingsTable):
    """Certificate of a listener, and the certificates that it requires."""

    cert: Path | None = FILE.setting(
        "PEM file with the server's certificate and the intermediate certificates. With it, "
        "clients must use TLS. SIGHUP reloads it.",
        example='"/etc/simplebus/server.pem"',
    )
    key: Path | None = FILE.setting(
        "PEM file with the unencrypted private key of the certificate.",
        example='"/etc/simplebus/server.key"',
    )
    ca: Path | None = FILE.setting(
        "PEM file of the certificate authorities that may sign client certificates.",
        default_text="the system's authorities",
        example='"/etc/simplebus/clients.pem"',
    )
    verify: bool = FLAG.setting("Require a trusted certificate from every client.")


@dataclass(frozen=True)
class NatsTlsSettings(CertificateSettings):
    """TLS of the NATS listener, if it differs from that of all listeners."""

    TOML_TABLE = "nats.tls"
    OPTION_PREFIX = "nats_tls_"
    PANEL = "NATS over TLS"

    verify_and_map: bool = FLAG.setting(
        "Require a certificate and take the user from it: an email address, a DNS name or the "
        "certificate's subject.",
    )
    handshake_first: bool = FLAG.setting(
        "Start TLS with the first byte, instead of after the server's INFO line."
    )
    optional: bool = FLAG.setting("Accept NATS clients with TLS and without it.")
    timeout: float = SECONDS.setting(
        "Maximum time for the TLS handshake of a NATS client.",
        sets=(NatsLimits, "tls_seconds"),
    )


@dataclass(frozen=True)
class HttpSettings(SettingsTable):
    """HTTP listener."""

    PANEL = "HTTP: health, metrics, the live page"

    http_port: int | None = PORT.setting(
        "TCP port for health, metrics and the live page. 0 picks a free port, which the ready line "
        "shows.",
        default_text="8222, or 0 with --port 0",
    )
    http_host: tuple[str, ...] = _HOST.setting(
        "Address or host name to listen on for HTTP, independent of --host. Repeat the option for "
        "more addresses.",
        default_text=_LOOPBACK,
        is_list=True,
    )
    http_name: tuple[str, ...] = TEXT.setting(
        "Further host name that HTTP requests over loopback may use, such as the name of a proxy "
        "on this machine. Repeat the option for more names. Without configured users, loopback "
        "requests must name an IP address, localhost, this machine's name or one of these, so that "
        "web pages cannot read the port.",
        example='["proxy.example"]',
        is_list=True,
    )
    trace_messages: bool = FLAG.setting(
        "Make OpenTelemetry spans of sampled messages that have a trace context, at most ten a "
        "second, from acceptance to acknowledgement. Needs the HTTP port, the extra otel, and a "
        "provider, for example by opentelemetry-instrument."
    )
    no_http: bool = FLAG.setting("Do not open the HTTP port.")


@dataclass(frozen=True)
class TlsSettings(CertificateSettings):
    """TLS of every listener without separate certificate settings."""

    TOML_TABLE = "tls"
    OPTION_PREFIX = "tls_"
    PANEL = "TLS"

    timeout: float = SECONDS.setting("Maximum time for the TLS handshake of a client.", default=5.0)


@dataclass(frozen=True)
class UserSettings(SettingsTable):
    """Users, and limits by address."""

    PANEL = "Users"
    IS_RELOADABLE = True

    users: Path | None = FILE.setting(
        "File of users, as [bold]simplebus user[/bold] writes it. With it, or with users in the "
        "configuration file, clients must authenticate.",
        default_text="no authentication",
        example='"/etc/simplebus/users.toml"',
    )
    max_connections_per_address: int = COUNT.setting(
        "Maximum number of open connections from one address, to the binary and the NATS port "
        "together. Further connections are closed at once. 0 sets no limit.",
        default=0,
    )
    max_classes_per_address: int | None = COUNT.setting(
        "Maximum number of classes that clients of one address create without a user. Further "
        "classes are refused. 0 sets no limit.",
        sets=(Limits, "classes_per_address"),
        default_text="half of --max-classes",
        example="2048",
    )
    max_classes_per_connection: int | None = COUNT.setting(
        "The same limit for one connection. 0 sets no limit.",
        sets=(Limits, "classes_per_connection"),
        default_text="a quarter of --max-classes",
        example="1024",
    )
    max_durables_per_address: int | None = COUNT.setting(
        "Maximum number of durables and groups, in all classes together, that clients of one "
        "address create without a user. Further ones are refused. 0 sets no limit.",
        sets=(Limits, "durables_per_address"),
        default_text="half of --max-durables",
        example="2048",
    )
    max_connection_rate: float = _CONNECTION_RATE.setting(
        "Sustained rate of new connections per second from one address; bursts may be ten times as "
        "large. Further connections are closed at once. 0 sets no limit.",
        default=0.0,
    )
    max_message_rate: float = _MESSAGE_RATE.setting(
        "Sustained rate of messages per second that all connections of one address together may "
        "publish; bursts may contain as many. Further messages wait and are not lost. 0 sets no "
        "limit.",
        default=0.0,
    )
    max_byte_rate: int = _BYTE_RATE.setting(
        "The same limit in bytes of published messages per second. 0 sets no limit.",
        default=0,
    )


@dataclass(frozen=True)
class ClassTable(SettingsTable):
    """Settings of one class, a table `[classes.NAME]` of the file; None for those of all classes.

    They have no options and no variables.
    """

    TOML_TABLE = "classes"
    IS_RELOADABLE = True

    id: int | None = CLASS_ID.setting(
        "Id of the class. Without it, the server assigns one.", example="7"
    )
    subjects: tuple[str, ...] = TEXT.setting(
        "NATS subjects or patterns whose messages are stored in the class.",
        example='["orders.>"]',
        is_list=True,
    )
    full: FullPolicy | None = choice(FullPolicy, "POLICY").setting(
        "Policy for a new message when the class is full.",
        sets=(ClassSettings, "full_policy"),
        example='"spill"',
    )
    max_messages: int | None = COUNT.setting(
        "Maximum number of stored messages.",
        sets=(ClassSettings, "messages_max"),
        example="1000000",
    )
    max_memory: int | None = SIZE.setting(
        "Maximum memory for stored messages.",
        sets=(ClassSettings, "bytes_max"),
        example='"256MiB"',
    )
    keep_messages: int | None = COUNT.setting(
        "Acknowledged messages to keep. If one of the three `keep-` keys is set, those of all "
        "classes do not apply.",
        example="1000",
    )
    keep_memory: int | None = SIZE.setting(
        "Size of the acknowledged messages to keep.", example='"64MiB"'
    )
    keep_seconds: float | None = SECONDS.setting(
        "Time to keep acknowledged messages.", example='"1h"'
    )
    last_values: bool | None = FLAG.setting(
        "`true` keeps the last message of each channel. Left out, clients decide.",
        sets=(ClassSettings, "last_values"),
        example="false",
    )
    pub_ack: bool | None = FLAG.setting(
        "`false` sends no PubAck for NATS messages with a reply subject, because programs reply to "
        "them.",
        sets=(ClassSettings, "pub_ack"),
        example="true",
    )
    ack_seconds: float | None = SECONDS.setting(
        "Ack timeout: time until an unacknowledged message is redelivered.",
        sets=(ClassSettings, "ack_seconds"),
        example="10",
    )
    max_deliveries: int | None = COUNT.setting(
        "Deliveries after which a message becomes a dead letter; 0 sets no limit.",
        sets=(ClassSettings, "deliveries_max"),
        example="8",
    )
    backoff: tuple[float, ...] | None = SECONDS.setting(
        "Delays before the second, third and further deliveries.",
        default=None,
        sets=(ClassSettings, "backoff_seconds"),
        example='[1, 5, "1min"]',
        is_list=True,
    )
    max_disk: int | None = SIZE.setting(
        'Maximum size of messages that are on disk only, for `full = "spill"`. Above it, '
        "publishers wait.",
        sets=(ClassSettings, "disk_bytes_max"),
        example='"10GiB"',
    )

    def values_by_key(self) -> dict[str, Any]:
        """Return the values by key of the file, with sizes as texts; None for missing keys."""
        return {
            setting.toml_key: setting.format_value(getattr(self, setting.field_name))
            for setting in self.settings()
        }


@dataclass(frozen=True)
class ServerConfig:
    """Values of all settings."""

    general: GeneralSettings
    acknowledgement: AcknowledgementSettings
    memory: MemorySettings
    timeouts: TimeoutSettings
    durability: DurabilitySettings
    engine: EngineSettings
    bind: BindSettings
    nats: NatsSettingsTable
    nats_tls: NatsTlsSettings
    http: HttpSettings
    tls: TlsSettings
    users: UserSettings

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> ServerConfig:
        """Return the configuration with these values, by `Setting.name`, and defaults."""
        tables: dict[str, Any] = {}
        for name, table in TABLES.items():
            present = [setting for setting in table.settings() if setting.name in values]
            tables[name] = table(
                **{setting.field_name: values[setting.name] for setting in present}
            )
        return cls(**tables)

    def items(self) -> Iterator[tuple[Setting, Any]]:
        """Yield each setting and its value."""
        for name, table in TABLES.items():
            for setting in table.settings():
                yield setting, getattr(getattr(self, name), setting.field_name)

    def values_of(self, owner: type) -> dict[str, Any]:
        """Return the values of the settings that set fields of `owner`, by field."""
        return {
            each.sets[1]: value
            for each, value in self.items()
            if each.sets is not None and each.sets[0] is owner
        }


def name_field_by_option(error: ValueError, *owners: type) -> ValueError:
    """Return an error about a field of the core with the option instead of the field's name.

    `owners` are the classes that can have raised the error.
    """
    if (found := find_field_setting(error, SETTINGS.values(), owners)) is None:
        return error
    setting, reason = found
    explanation = f" ({setting.why_bounded})" if setting.why_bounded and " from " in reason else ""
    return ValueError(f"{setting.flag} {reason}{explanation}")


def find_field_setting(
    error: ValueError, settings: Iterable[Setting], owners: Collection[type]
) -> tuple[Setting, str] | None:
    """Return the setting whose field an error of the core names, and the rest of the error.

    Args:
        error: Error whose text begins with the name of a field.
        settings: Settings to search.
        owners: Classes of the core that can have raised the error.
    """
    name, _, reason = str(error).removeprefix("limit ").partition(" ")
    for setting in settings:
        if setting.sets is not None and setting.sets[0] in owners and setting.sets[1] == name:
            return setting, reason
    return None


TABLES: Mapping[str, type[SettingsTable]] = get_type_hints(ServerConfig)
"""Type of each table, by the field of `ServerConfig`."""
SETTINGS: Mapping[str, Setting] = {
    setting.name: setting for table in TABLES.values() for setting in table.settings()
}
"""All settings by name, in the order of the help."""
SETTING_TABLES = ("serve", "tls", "nats", "nats.tls")
"""Tables of the configuration file that hold settings, in the order of the sample file."""
