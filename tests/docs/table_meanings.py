"""Meanings of the keys in tables of the configuration files, for the reference page.

A key that has an option is described by the option's help text instead.
"""
# ruff: noqa: E501 - one row of a table per line.

from __future__ import annotations

import msgspec

from simplebus.config import bridges, nats_users, users
from simplebus.config.setting import SettingsTable
from simplebus.gateway import config as gateway_config
from simplebus.gateway.modules import logger, tail, timer, transform, uplink_settings

TABLES: dict[str, list[tuple[str, str, type[msgspec.Struct | SettingsTable], str, str]]] = {
    "Users of all listeners": [
        (
            "[[users]]",
            "Also in the file that `users` names. A user needs a password, token, nkey, certificate "
            "or network. See [security](../guide/security.md).",
            users.UserTable,
            "",
            "-",
        ),
        (
            "[users.permissions]",
            "A rule is a class name or id, with `*` for any characters, optionally followed by a "
            'space and a channel pattern: `"orders eu.#"`.',
            users.PermissionsTable,
            "",
            "-",
        ),
        (
            "publish, subscribe",
            "Of `[users.permissions]`, as a table.",
            users.RulesTable,
            "",
            "-",
        ),
        (
            "[users.nats]",
            "Permissions for NATS subjects.",
            users.SubjectPermissionsTable,
            "",
            "-",
        ),
        (
            "publish, subscribe",
            "Of permissions for subjects, as a table.",
            users.SubjectRulesTable,
            "",
            "-",
        ),
        (
            "allow_responses",
            "As a table.",
            users.ResponsesTable,
            "",
            "-",
        ),
    ],
    "Users of NATS clients alone, deprecated": [
        (
            "[nats]",
            "Beside the settings of the listener. Use `[[users]]` instead.",
            nats_users.NatsTable,
            "",
            "-",
        ),
        (
            "[[nats.users]]",
            "",
            nats_users.NatsUserTable,
            "",
            "-",
        ),
    ],
    "Bridges": [
        (
            "[[bridges]]",
            "In the file of `simplebus serve`, or of `simplebus bridge FILE`. See "
            "[bridges](../guide/bridges.md).",
            bridges.BridgeTable,
            "",
            "-",
        ),
        (
            "[[bridges.copy]]",
            "",
            bridges.CopyTable,
            "",
            "-",
        ),
        (
            "[bridges.source], [bridges.target]",
            "",
            bridges.AccessTable,
            "",
            "-",
        ),
    ],
    "Gateways": [
        (
            "[modules.NAME]",
            "In the file of `simplebus gateway FILE`. See [gateways](../guide/gateway.md).",
            gateway_config._ModuleTable,
            """
            module | - | `logger`, `tail`, `timer`, `transform` or `uplink`; or a class of your own as `package.module:Name`.
            settings | - | Settings of the module, see below.
            hears | - | Source modules of its messages; `["*"]` for all others.
            places | units of 64 KiB | Size of its queue. A longer message uses several units.
            full | - | What happens to a message when the queue is full; with `block`, publishers wait.
            """,
            "_",
        ),
        (
            "Settings of logger",
            "",
            logger.LoggerSettings,
            """
            level | - | Level of the log lines.
            content | - | Representation of the content.
            length | bytes | Maximum length of the content that is shown.
            """,
            "_",
        ),
        (
            "Settings of tail",
            "",
            tail.TailSettings,
            """
            path | - | File to read.
            start | - | Where to begin in a file that was not read before.
            remember | - | File in which the position is saved. Without it, a restarted module begins at `start`.
            poll_seconds | seconds | Interval between two reads.
            """,
            "_",
        ),
        (
            "Settings of timer",
            "",
            timer.TimerSettings,
            """
            every | seconds | Interval between two messages.
            content | - | Content of the messages.
            properties | - | Properties of the messages; the property `tick` numbers them.
            count | messages | Number of messages after which the timer ends. Left out: no limit.
            """,
            "_",
        ),
        (
            "Settings of transform",
            "Properties are renamed, then removed, then set.",
            transform.TransformSettings,
            """
            only | - | Properties that a message must have; others are dropped.
            set | - | Properties to set.
            rename | - | New name by old name.
            remove | - | Properties to remove.
            function | - | Function that is called last, as `package.module:name`. It returns a message, several messages, or None.
            """,
            "_",
        ),
        (
            "Settings of uplink",
            "Missing credentials come from the environment, as for other clients.",
            uplink_settings.UplinkTable,
            """
            to | - | Address of the target; those of a NATS cluster are separated by commas.
            class | - | Class of the messages at the target.
            channel | - | Channel of the messages.
            channel_property | - | Property that contains the channel of a message.
            data_dir | - | Directory for messages that are not sent yet. Without it, they are in memory.
            max_memory | bytes | Maximum size of messages in memory.
            name | - | Unique name of the uplink at the target. Left out: the module's name with a unique suffix.
            stream | - | JetStream stream that must store the messages.
            under_way | messages | Messages in flight into the stream. Left out: as many as keep their order.
            user | - | User at the target.
            password | - | Password of the user.
            token | - | Token, instead of user and password.
            seed | - | Seed of an nkey, for a NATS server.
            ca | - | PEM file of trusted authorities. Left out: those of the system.
            cert | - | PEM file with a client certificate.
            key | - | PEM file with its key, if it is not in the same file.
            credentials | - | TOML file with these keys except `seed`, or a table with user, password, token and seed.
            """,
            "_",
        ),
    ],
}
"""Heading, introduction, type, meanings and hyphen of the keys of each table, by section.

A `SettingsTable` has the meanings of its keys itself.
"""
