"""Sample configuration file with every setting, generated from the options of `serve`.

Comments begin with `## ` for text, `# ` for a default and `#- ` for an example. Removing every
`# ` changes nothing, because those lines set the defaults.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from enum import Enum
from typing import Any

_WIDTH = 96
_LEFT_OUT = {"config", "help"}
_SECTIONS = (("nats_tls_", "nats.tls"), ("nats_", "nats"), ("tls_", "tls"))
_FLAG = re.compile(r"--([a-z][a-z-]*)")
_MARKUP = re.compile(r"\[/?bold\]")

EXAMPLES = {
    "engine": '"nats://10.0.0.1,nats://10.0.0.2,nats://10.0.0.3"',
    "engine_ca": '"/etc/simplebus/cluster.pem"',
    "data_dir": '"/var/lib/simplebus"',
    "last_values": '["state"]',
    "bind": '["orders.>=orders"]',
    "users": '"/etc/simplebus/users.toml"',
    "tls_cert": '"/etc/simplebus/server.pem"',
    "tls_key": '"/etc/simplebus/server.key"',
    "tls_ca": '"/etc/simplebus/clients.pem"',
    "nats_tls_cert": '"/etc/simplebus/server.pem"',
    "nats_tls_key": '"/etc/simplebus/server.key"',
    "nats_tls_ca": '"/etc/simplebus/clients.pem"',
}
"""Example values of options without a default."""

TABLES = """\
# Users of all listeners, and their permissions. Without users, everybody can connect. A user
# without permissions may do everything. `simplebus user add` writes such tables to a users file.
#
#- [[users]]
#- name = "till"
#- password = "change me"            # or "$argon2id$…"; or token = "sha256:…", nkey, certificate
#- max-connections = 100             # open connections on all listeners together
#- max-message-rate = 10000          # messages per second of all its connections
#- max-byte-rate = "10MiB"           # bytes per second; publishing above a rate waits
#- max-classes = 100                 # classes it may create; by default a quarter of all,
#- max-durables = 100                # unlimited without permissions; the same for durables
#- addresses = ["10.1.0.0/16"]       # networks of clients that cannot authenticate
#- [users.permissions]
#- publish = { allow = ["orders eu.#", "audit"], deny = ["orders eu.test"] }
#- subscribe = ["orders"]
#- admin = ["inquire", "purge dead.*"]     # also fetch, configure, monitor
#- [users.nats]
#- publish = ["metrics.>"]           # for subjects that are bound to no class

# Users of the NATS listener only.
#
#- [[nats.users]]
#- user = "ada"
#- password = "change me"
#- permissions = { publish = ["orders.>"], subscribe = { deny = "secret.>" } }

# Settings of single classes, by class name.
#
#- [classes.orders]
#- id = 7                      # by default, the server assigns an id
#- subjects = ["orders.>"]     # NATS subjects that are stored in the class
#- full = "block"              # drop_oldest, drop_newest or spill
#- max-messages = 1000000
#- max-memory = "256MiB"
#- keep-seconds = 3600         # time to keep acknowledged messages; also keep-messages, keep-memory
#- ack-seconds = 10            # time until an unacknowledged message is redelivered
#- backoff = [1, 5, 30]        # seconds before each redelivery
#- max-deliveries = 8          # deliveries until a message becomes a dead letter; 0: no limit
#- last-values = false         # true keeps the last message of each channel

# Bridges that copy classes between servers. Without `from` or `to` it is this server.
#
#- [[bridges]]
#- name = "hq"
#- to = "simplebus://hq:8888"
#- classes = ["orders"]
"""


def render_sample(parameters: Iterable[Any]) -> str:
    """Return the sample file for the typer parameters of `serve`."""
    lines = [
        "# Configuration file of `simplebus serve --config FILE` with every setting.",
        "# Commented-out values are the defaults. Options on the command line take precedence,",
        "# then environment variables: SIMPLEBUS_PORT for port, and so on.",
        "# `simplebus check-config FILE` checks the file. SIGHUP makes the server reload it.",
    ]
    sections: dict[str, list[Any]] = {"serve": []} | {name: [] for _, name in _SECTIONS[::-1]}
    for each in parameters:
        if each.name not in _LEFT_OUT:
            sections[_section(each.name)[1]].append(each)
    for section, members in sections.items():
        lines += ["", f"[{section}]"]
        for each in members:
            lines += ["", *_render_setting(each)]
    return "\n".join(lines) + "\n\n" + TABLES


def _section(name: str) -> tuple[str, str]:
    """Return the prefix of an option's name that its table replaces, and the table."""
    return next((each for each in _SECTIONS if name.startswith(each[0])), ("", "serve"))


def _render_setting(parameter: Any) -> list[str]:
    help_text = _FLAG.sub(_toml_key, _MARKUP.sub("", parameter.help))
    lines = textwrap.wrap(
        help_text, _WIDTH, initial_indent="## ", subsequent_indent="## ", break_on_hyphens=False
    )
    key = parameter.name.removeprefix(_section(parameter.name)[0]).replace("_", "-")
    value = _value(parameter)
    if value is None:
        return [*lines, f"#- {key} = {EXAMPLES.get(parameter.name) or _example(parameter)}"]
    return [*lines, f"# {key} = {value}"]


def _toml_key(flag: re.Match[str]) -> str:
    """Return the key in the file of an option that a help text names."""
    name = flag[1].replace("-", "_")
    return name.removeprefix(_section(name)[0]).replace("_", "-")


def _example(parameter: Any) -> str:
    return json.dumps("/etc/simplebus/file" if parameter.metavar == "FILE" else "…")


def _value(parameter: Any) -> str | None:
    """Return the default as TOML; None without a default."""
    default = parameter.default
    shown = parameter.show_default
    if default is None:
        return _fixed_default(shown) if isinstance(shown, str) else None
    if parameter.metavar == "SIZE" and isinstance(shown, str) and default:
        return json.dumps(shown)
    if isinstance(default, Enum):
        default = default.value
    return json.dumps(default)


def _fixed_default(help_default: str) -> str | None:
    """Return a default that depends on no other option, from its text in the help."""
    first = help_default.partition(",")[0]
    words = first.split(" and ")
    if re.fullmatch(r"[0-9]+(?:[KMG]iB)?", first):
        return first if first.isdigit() else json.dumps(first)
    return json.dumps(words) if all(re.fullmatch(r"[0-9a-f:.]+", w) for w in words) else None
