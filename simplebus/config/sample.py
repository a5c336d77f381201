"""Sample configuration file with every setting, generated from the options of `serve`.

In the tables of settings, lines begin with `## ` for text, `# ` for a default and `#- ` for an
example. Removing their `# ` changes nothing, because those lines set the defaults.
"""

from __future__ import annotations

import json
import re
import textwrap

from simplebus.config.server_schema import SETTING_TABLES, SETTINGS, ClassTable
from simplebus.config.setting import Setting, normalize

_WIDTH = 96
_FLAG_NAME = re.compile(r"--([a-z][a-z-]*)")
_MARKUP = re.compile(r"\[/?bold\]")

USERS = """\
# Users of all listeners, and their permissions. Without users, every client can connect. A user
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
#- publish = ["metrics.>"]           # for NATS subjects that are bound to no class
"""

BRIDGES = """\
# Bridges that copy classes between servers. Without `from` or `to` it is this server.
#
#- [[bridges]]
#- name = "hq"
#- to = "simplebus://hq:8888"
#- classes = ["orders"]
"""


def render_sample() -> str:
    """Return the sample file."""
    lines = [
        "# Configuration file of `simplebus serve --config FILE` with every setting.",
        "# Commented-out values are the defaults. Options on the command line take precedence,",
        "# then environment variables: SIMPLEBUS_PORT for port, and so on.",
        "# `simplebus check-config FILE` checks the file. SIGHUP makes the server reload it.",
    ]
    for table in SETTING_TABLES:
        lines += ["", f"[{table}]"]
        for setting in SETTINGS.values():
            if setting.toml_table == table:
                lines += ["", *_render_setting(setting)]
    lines += [
        "",
        USERS.rstrip(),
        "",
        "# Settings of single classes, by class name.",
        "#",
        "#- [classes.orders]",
    ]
    for setting in ClassTable.settings():
        lines += _render_setting(setting)
    return "\n".join(lines) + "\n\n" + BRIDGES


def _render_setting(setting: Setting) -> list[str]:
    help_text = _FLAG_NAME.sub(_file_key, _MARKUP.sub("", setting.help))
    lines = textwrap.wrap(
        help_text, _WIDTH, initial_indent="## ", subsequent_indent="## ", break_on_hyphens=False
    )
    default = _default(setting)
    prefix, value = ("#-", setting.example or '"…"') if default is None else ("#", default)
    return [*lines, f"{prefix} {setting.toml_key} = {value}"]


def _file_key(flag: re.Match[str]) -> str:
    """Return the key in the file of an option that a help text names."""
    return SETTINGS[normalize(flag[1])].toml_key


def _default(setting: Setting) -> str | None:
    """Return the default as TOML; None without a default, or if it depends on other settings."""
    if isinstance(setting.default, bool):
        return json.dumps(setting.default)
    text = setting.option_default or setting.default_text.partition(",")[0]
    if setting.is_list:
        return json.dumps(text.split(" and ")) if text else None
    if re.fullmatch(r"[0-9.]+", text):
        return text
    is_fixed = setting.default is not None or re.fullmatch(r"[0-9]+[KMG]iB", text)
    return json.dumps(text) if is_fixed else None
