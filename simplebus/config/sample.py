"""A configuration file with every setting in it, as an example to begin with.

Rule 1: options, their defaults and what they mean come from `serve` itself; nothing is said twice.
Rule 2: a line that begins with `# ` and is no text is a default: with all of these taken out of
their comments, the file says what no file says. One that begins with `#- ` is an example.
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
"""Of options that have no default."""

TABLES = """\
# Who may come in through any door, and what they may do. Nobody named is everybody; who has no
# permissions may do everything. `simplebus user add` makes such tables, in a file of their own.
#
#- [[users]]
#- name = "till"
#- password = "change me"            # or "$argon2id$…"; or token = "sha256:…", nkey, certificate
#- max-connections = 100             # at all doors together; and in a second they may publish
#- max-message-rate = 10000          # so many messages,
#- max-byte-rate = "10MiB"           # of so many bytes: what is beyond that waits
#- max-classes = 100                 # that it may make; without: a quarter of all, and any number
#- max-durables = 100                # where it may do everything; the same of durables and groups
#- addresses = ["10.1.0.0/16"]       # from where clients that cannot say who they are may come
#- [users.permissions]
#- publish = { allow = ["orders eu.#", "audit"], deny = ["orders eu.test"] }
#- subscribe = ["orders"]
#- admin = ["inquire", "purge dead.*"]     # also fetch, configure, monitor
#- [users.nats]
#- publish = ["metrics.>"]           # subjects that are bound to no class

# Who may come in through the NATS door alone.
#
#- [[nats.users]]
#- user = "ada"
#- password = "change me"
#- permissions = { publish = ["orders.>"], subscribe = { deny = "secret.>" } }

# Classes that do something in their own way, by their names.
#
#- [classes.orders]
#- id = 7                      # or one that the bus gives it
#- subjects = ["orders.>"]     # of the NATS door, what is kept in it
#- full = "block"              # drop_oldest, drop_newest or spill
#- max-messages = 1000000
#- max-memory = "256MiB"
#- keep-seconds = 3600         # also keep-messages, keep-memory: past the last acknowledgement
#- ack-seconds = 10            # how long a message may be unacknowledged,
#- backoff = [1, 5, 30]        # the pauses before it comes again,
#- max-deliveries = 8          # and when it is given up; 0: never
#- last-values = false         # whether the last message of each channel stays

# What is copied to and from other servers. Without `from` it is this one.
#
#- [[bridges]]
#- name = "hq"
#- to = "simplebus://hq:8888"
#- classes = ["orders"]
"""


def text(parameters: Iterable[Any]) -> str:
    """The file. `parameters` are those of `serve`."""
    lines = [
        "# A configuration file of `simplebus serve --config FILE`, with all there is to set.",
        "# What is commented out is as it is by itself. Options on the command line win, then",
        "# variables of the environment: SIMPLEBUS_PORT for port, and so on.",
        "# `simplebus check-config FILE` looks it over. SIGHUP has a server read it again.",
    ]
    sections: dict[str, list[Any]] = {"serve": []} | {name: [] for _, name in _SECTIONS[::-1]}
    for each in parameters:
        if each.name not in _LEFT_OUT:
            sections[_section(each.name)[1]].append(each)
    for section, members in sections.items():
        lines += ["", f"[{section}]"]
        for each in members:
            lines += ["", *_setting(each)]
    return "\n".join(lines) + "\n\n" + TABLES


def _section(name: str) -> tuple[str, str]:
    """The beginning of an option's name that its table stands for, and that table."""
    return next((each for each in _SECTIONS if name.startswith(each[0])), ("", "serve"))


def _setting(parameter: Any) -> list[str]:
    said = _FLAG.sub(_key, _MARKUP.sub("", parameter.help))
    lines = textwrap.wrap(
        said, _WIDTH, initial_indent="## ", subsequent_indent="## ", break_on_hyphens=False
    )
    key = parameter.name.removeprefix(_section(parameter.name)[0]).replace("_", "-")
    value = _value(parameter)
    if value is None:
        return [*lines, f"#- {key} = {EXAMPLES.get(parameter.name) or _example(parameter)}"]
    return [*lines, f"# {key} = {value}"]


def _key(flag: re.Match[str]) -> str:
    """How an option that a text names is called in the file."""
    name = flag[1].replace("-", "_")
    return name.removeprefix(_section(name)[0]).replace("_", "-")


def _example(parameter: Any) -> str:
    return json.dumps("/etc/simplebus/file" if parameter.metavar == "FILE" else "…")


def _value(parameter: Any) -> str | None:
    """The default, as TOML; None where there is none."""
    default = parameter.default
    shown = parameter.show_default
    if default is None:
        return _derived(shown) if isinstance(shown, str) else None
    if parameter.metavar == "SIZE" and isinstance(shown, str) and default:
        return json.dumps(shown)
    if isinstance(default, Enum):
        default = default.value
    return json.dumps(default)


def _derived(shown: str) -> str | None:
    """What an option is that is left out, if it is the same whatever the others are."""
    first = shown.partition(",")[0]
    words = first.split(" and ")
    if re.fullmatch(r"[0-9]+(?:[KMG]iB)?", first):
        return first if first.isdigit() else json.dumps(first)
    return json.dumps(words) if all(re.fullmatch(r"[0-9a-f:.]+", w) for w in words) else None
