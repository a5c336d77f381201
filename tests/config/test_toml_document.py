"""Line numbers of TOML keys. The scanner finds the same keys as tomllib."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.config.toml_document import find_line, locate_keys


def key_paths(raw: Any, path: str = "") -> set[str]:
    """Return the key paths of parsed TOML."""
    found = {path} - {""}
    if isinstance(raw, dict):
        for name, value in raw.items():
            name = name.replace("-", "_")
            found |= key_paths(value, f"{path}.{name}" if path else name)
    elif isinstance(raw, list):
        for index, value in enumerate(raw):
            found |= key_paths(value, f"{path}[{index}]")
    return found


EXAMPLE = '''# A comment = 1
title = "a # b = [ ] { }"
'quoted key' = \'\'\'
[not.a.table]
x = 1\'\'\' # here
"escaped \\u00e9" = """
one \\"""
[still no table]"""

[serve] # [x]
max-memory = 1
host = [ "a", # one
  "b]",
  [ 1, 2 ],
]
dotted.key."x y" = 1979-05-27T07:32:00Z

[[nats.users]]
user = 'x'
permissions = { publish = ["a", "b"], subscribe = { deny = "c" } }
[nats.users.more]
x = 1
[[nats.users]]
user = 'y'
[[nats.users.keys]]
[[nats.users.keys]]
a = 1
[nats.tls]
cert = """x"""
'''


def test_each_key_has_its_line_number() -> None:
    found = locate_keys(EXAMPLE)
    assert set(found) == key_paths(tomllib.loads(EXAMPLE))
    lines = EXAMPLE.splitlines()
    for path, line_text in {
        "title": "title",
        "quoted key": "'quoted key'",
        "serve": "[serve]",
        "serve.max_memory": "max-memory",
        "serve.host[1]": "host = [",
        "serve.host[2]": "host = [",
        "serve.dotted.key.x y": "dotted",
        "nats.users[0].permissions.subscribe.deny": "permissions",
        "nats.users[0].more.x": "x = 1",
        "nats.users[1].user": "user = 'y'",
        "nats.users[1].keys[1].a": "a = 1",
        "nats.tls.cert": "cert",
    }.items():
        assert lines[found[path] - 1].strip().startswith(line_text), path


names = st.text("ab-_.é \"'", min_size=1, max_size=3)
# No key occurs with both `-` and `_`: both spellings have the same path.
values = st.recursive(
    st.one_of(st.integers(), st.booleans(), st.text("ab#[]{}=,'\"\\\n é", max_size=6)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


def to_toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(f"{json.dumps(name)} = {to_toml(each)}" for name, each in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list):
        return "[" + ",\n # ] }\n".join(map(to_toml, value)) + "]"
    return json.dumps(value)


@given(st.dictionaries(names, values, max_size=4), st.lists(st.dictionaries(names, values)))
def test_keys_are_those_of_tomllib(table: dict[str, Any], items: list[Any]) -> None:
    text = "".join(f"{json.dumps(name)} = {to_toml(value)}\n" for name, value in table.items())
    for item in items:
        text += "\n[[ 'the.list' . x ]] # one\n"
        text += "".join(f"{json.dumps(name)} = {to_toml(value)}\n" for name, value in item.items())
    assert set(locate_keys(text)) == key_paths(tomllib.loads(text))


@given(st.text("ab[]{}=.,'\"#\\\n ", max_size=30))
def test_arbitrary_text_has_valid_line_numbers(text: str) -> None:
    lines = locate_keys(text).values()
    assert all(1 <= line <= text.count("\n") + 1 for line in lines)


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        ("serve.max-memory: 'x' is not a size", 2),
        ("serve: 'host' is unknown; did you mean 'hots'?", 3),
        ("nats.users[10].user: expected a text", 9),
        ("nats.users[1].password: is not there", 8),
        ("classes.my-class.subjects[1]: no", 12),
        ("classes.my-class.subjects[7]: no", 11),
        ("'server' is unknown", 4),
        ("a sentence about nothing", None),
        ("served: no", None),
    ],
)
def test_error_line_is_that_of_the_longest_known_key(mistake: str, line: int | None) -> None:
    found = {
        "serve": 1,
        "serve.max_memory": 2,
        "serve.host": 3,
        "server": 4,
        "nats.users[1]": 8,
        "nats.users[10].user": 9,
        "classes.my_class": 10,
        "classes.my_class.subjects": 11,
        "classes.my_class.subjects[1]": 12,
    }
    assert find_line(mistake, found) == line
