"""Types of a program with typed messages, as mypy --strict sees them.

An unused `type: ignore` is an error there, so each one below marks a mistake that mypy finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, assert_type

import msgspec

from simplebus.client.codecs import BYTES_CODEC, Codec, find_codec
from simplebus.client.message_types import Binding, Registry, message

Item = TypeVar("Item")
registry = Registry()


@message(class_id=7, name="shop-created")
class ShopCreated(msgspec.Struct):
    id: int


@registry.message(name="shop-closed", codec="msgpack")
@dataclass
class ShopClosed:
    id: int


@registry.message
class ShopMoved(msgspec.Struct):
    id: int


class Page(msgspec.Struct, Generic[Item]):
    items: list[Item]


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


class PointCodec:
    name = "point"

    def encode(self, value: Point) -> bytes:
        return b"%d" % value.x

    def decode(self, payload: bytes) -> Point:
        return Point(int(payload))


@registry.message(class_id=3, codec=PointCodec())
class Corner(Point):  # mypy does not compare a decorator's argument with its class.
    pass


def decorated_classes_stay_themselves() -> None:
    assert_type(ShopCreated(id=7), ShopCreated)
    assert_type(ShopClosed(id=7).id, int)
    assert_type(ShopMoved(id=7), ShopMoved)


def a_binding_knows_its_type() -> None:
    binding = registry.binding_of(ShopClosed)
    assert_type(binding, Binding[ShopClosed])
    assert_type(binding.encode(ShopClosed(id=1)), bytes)
    assert_type(binding.decode(b"{}"), ShopClosed)
    assert_type(binding.codec, Codec[ShopClosed])
    binding.encode(ShopCreated(id=1))  # type: ignore[arg-type]
    binding.class_id = 9  # type: ignore[misc]
    assert_type(registry.by_class(7), Binding[Any] | None)


def binding_takes_what_fits() -> None:
    assert_type(registry.bind(Point, class_id=1, codec=PointCodec()), Binding[Point])
    assert_type(registry.bind(Page[int], class_id=2), Binding[Page[int]])
    assert_type(registry.binding_of(Page[int]).decode(b"").items, list[int])
    registry.bind(ShopMoved, codec=PointCodec())  # type: ignore[misc]
    registry.bind(ShopMoved, codec="yaml")  # type: ignore[arg-type]
    registry.bind(ShopMoved, class_id="7")  # type: ignore[arg-type]


def a_codec_knows_its_type() -> None:
    assert_type(find_codec(ShopMoved), Codec[ShopMoved])
    assert_type(find_codec(ShopMoved, "msgpack").decode(b""), ShopMoved)
    assert_type(BYTES_CODEC.decode(b""), bytes)
    codec: Codec[Point] = PointCodec()
    assert_type(codec.decode(b"1"), Point)
