"""Meanings of the keys in tables of the configuration files, for the reference page.

A key that has an option is described by the option's help text instead.
"""
# ruff: noqa: E501 - one row of a table per line.

from __future__ import annotations

import msgspec

from simplebus.config import bridges, nats_users, schema, users
from simplebus.gateway import config as gateway_config
from simplebus.gateway.modules import logger, tail, timer, transform, uplink_settings

TABLES: dict[str, list[tuple[str, str, type[msgspec.Struct], str, str]]] = {
    "Users of all listeners": [
        (
            "[[users]]",
            "Also in the file that `users` names. A user needs a password, token, nkey, certificate "
            "or network. See [security](../guide/security.md).",
            users.UserTable,
            """
            name | - | Name of the user.
            password | - | Password, or its Argon2 hash as `simplebus user add` writes it.
            token | - | `sha256:` and the hash of a token.
            nkey | - | Public key, for NATS clients.
            certificate | - | Name in a client certificate: email address, DNS name, URI or subject.
            addresses | - | Networks of clients that send no credentials, such as `10.1.0.0/16`.
            max_connections | connections | Open connections on all listeners together; 0 sets no limit.
            max_message_rate | messages per second | Published by all connections together; 0 sets no limit.
            max_byte_rate | bytes per second | The same in bytes; 0 sets no limit.
            max_classes | classes | Classes that the user may create; 0 sets no limit. Left out: a quarter of all for a user with permissions.
            max_durables | durables | Durables and groups in all classes together. Left out: a quarter of those of one class for a user with permissions.
            permissions | - | See `[users.permissions]`. Without the table, the user may do everything.
            nats | - | See `[users.nats]`. Without the table, a user whose `permissions` restrict classes may use only `_INBOX.>` of the subjects that are not bound to a class.
            """,
            "-",
        ),
        (
            "[users.permissions]",
            "A rule is a class name or id, with `*` for any characters, optionally followed by a "
            'space and a channel pattern: `"orders eu.#"`.',
            users.PermissionsTable,
            """
            publish | - | Classes and channels to publish to: a table `{ allow, deny }`, or what is allowed. Left out: all.
            subscribe | - | Classes and channels to subscribe to, in the same form.
            admin | - | `inquire`, `fetch`, `purge`, `configure` and `monitor`, each optionally followed by a class.
            wildcards | - | `false` refuses subscriptions whose channels have wildcards.
            """,
            "-",
        ),
        (
            "publish, subscribe",
            "Of `[users.permissions]`, as a table.",
            users.RulesTable,
            """
            allow | - | Allowed rules. Left out: all.
            deny | - | Denied rules, which override the allowed ones.
            """,
            "-",
        ),
        (
            "[users.nats]",
            "Permissions for NATS subjects.",
            schema.SubjectPermissionsTable,
            """
            publish | - | Subjects to publish to: a table `{ allow, deny }`, or what is allowed. Left out: all.
            subscribe | - | Subjects to subscribe to. A subject may be followed by a space and a queue group.
            allow_responses | - | `true`, or a table `{ max, expires }`: the user may reply to subjects that it may not publish to.
            """,
            "_",
        ),
        (
            "publish, subscribe",
            "Of permissions for subjects, as a table.",
            schema.SubjectRulesTable,
            """
            allow | - | Allowed subjects. Left out: all.
            deny | - | Denied subjects, which override the allowed ones.
            """,
            "_",
        ),
        (
            "allow_responses",
            "As a table.",
            schema.ResponsesTable,
            """
            max | replies | Maximum replies to one request; negative for no limit.
            expires | seconds | Time to reply; negative for no limit.
            """,
            "_",
        ),
    ],
    "Users of NATS clients alone, deprecated": [
        (
            "[nats]",
            "Beside the settings of the listener. Use `[[users]]` instead.",
            nats_users.NatsTable,
            """
            token | - | Token that every client may send.
            user | - | Name of a single user.
            password | - | Password of this user, in plain text.
            users | - | See `[[nats.users]]`.
            no_auth_user | - | User of clients that send no credentials.
            default_permissions | - | Permissions of users without permissions of their own.
            """,
            "_",
        ),
        (
            "[[nats.users]]",
            "",
            nats_users.NatsUserTable,
            """
            user | - | Name of the user, or the name in its certificate with `verify-and-map`.
            password | - | Password, in plain text.
            nkey | - | Public key, instead of name and password.
            permissions | - | Permissions for subjects, as in `[users.nats]`.
            """,
            "_",
        ),
    ],
    "Bridges": [
        (
            "[[bridges]]",
            "In the file of `simplebus serve`, or of `simplebus bridge FILE`. See "
            "[bridges](../guide/bridges.md).",
            bridges.BridgeTable,
            """
            name | - | Name of the bridge, under which both servers store its position: do not change it.
            from | - | Address of the source. In the file of `serve`, left out: that server.
            to | - | Address of the target, in the same form. `nats://` and `tls://` addresses are NATS servers; those of a cluster are separated by commas.
            classes | - | Classes to copy unchanged, by name or id.
            copy | - | See `[[bridges.copy]]`.
            both | - | `true` copies in both directions.
            hops | servers | Maximum number of servers that a copied message has passed.
            heartbeat | seconds | Silence after which a peer is checked; after three times as long the connection is lost.
            path | - | `false` omits the header `bridge-path` for a NATS target; only if no message can return from there.
            user | - | User at a NATS server.
            password | - | Password at a NATS server.
            token | - | Token at a NATS server.
            seed | - | Seed of an nkey at a NATS server.
            source | - | Credentials at the source, see below.
            target | - | Credentials at the target, see below.
            near | - | Deprecated: use `source`.
            far | - | Deprecated: use `target`.
            """,
            "_",
        ),
        (
            "[[bridges.copy]]",
            "",
            bridges.CopyTable,
            """
            class | - | Class to copy, by name or id. From a NATS server: the class at the target.
            to | - | Class at the target. Left out: the same.
            channels | - | Patterns of the channels to copy. Left out: all. From a NATS server: its subjects.
            rewrite | - | Pattern and template of each rule that renames channels. The first matching rule applies.
            start | - | First message that a new copier copies: `waiting`, `new`, `earliest` or `last`.
            stream | - | JetStream stream to read, or that must store the messages. Left out: NATS without JetStream.
            under_way | messages | Messages in flight into the stream, 1 to 24,576. Left out: as many as keep their order.
            """,
            "_",
        ),
        (
            "[bridges.source], [bridges.target]",
            "",
            bridges.AccessTable,
            """
            user | - | User name.
            password | - | Password of the user.
            token | - | Token, instead of user and password.
            ca | - | PEM file of trusted authorities. Left out: those of the system.
            cert | - | PEM file with a client certificate.
            key | - | PEM file with its key, if it is not in the same file.
            credentials | - | TOML file with all of these keys, instead of them.
            """,
            "_",
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
"""Heading, introduction, type, meanings and hyphen of the keys of each table, by section."""
