"""Class names that doors tell one another."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from simplebus.core.limits import NAME_CHARACTERS_MAX
from simplebus.core.requests import NamedClass
from simplebus.engine.content import HEADERS_BYTES_MAX
from simplebus.engine.naming import Naming


class Names(dict[str, int]):
    """Those of a door."""

    def take(self, named: list[Any]) -> None:
        for each in named:
            assert isinstance(each, NamedClass)
            assert each.name is not None
            assert each.id is not None
            self[each.name] = each.id


def test_what_one_tells_another_hears_and_tells_nobody_again() -> None:
    ours, theirs = Names((f"class {n}", n) for n in range(50)), Names()
    here, there = Naming(ours, ours.take), Naming(theirs, theirs.take)
    for said in here.fresh():
        there.hear(said)
    assert theirs == ours
    assert here.fresh() == there.fresh() == []
    here.tell_again()
    assert {name for said in here.fresh() for name in msgspec.json.decode(said)} == set(ours)


def test_no_message_of_names_is_too_long_for_any_server() -> None:
    names = Names((chr(n % 32) * (NAME_CHARACTERS_MAX - 4) + f"{n:04}", n) for n in range(4096))
    assert all(len(said) <= HEADERS_BYTES_MAX for said in Naming(names, names.take).fresh())


@pytest.mark.parametrize(
    "said",
    [b"", b"[1]", b'{"a":70000}', b'{"a":-1}', b'{"a":"b"}', b'{"":1}', b"[" * 5000,
     b'{"%b":1}' % (b"x" * 300)],
)  # fmt: skip
def test_nonsense_names_nothing(said: bytes) -> None:
    names = Names()
    Naming(names, names.take).hear(said)
    assert names == {}
