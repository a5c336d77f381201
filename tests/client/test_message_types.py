"""Tests of bindings and registries, and of the errors for missing and conflicting bindings."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, TypedDict, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client import message_types as module
from simplebus.client.codecs import DecodeError
from simplebus.client.message_types import DEFAULT_REGISTRY, Binding, Registry, UnboundTypeError
from simplebus.core.errors import BusError

Item = TypeVar("Item")


class ShopCreated(msgspec.Struct):
    id: int


class ShopClosed(msgspec.Struct):
    id: int


class ChainCreated(ShopCreated):
    pass


class HTTPProblem2Found(msgspec.Struct):
    pass


class Page(msgspec.Struct, Generic[Item]):
    items: list[Item]


class Shops(Page[int]):
    pass


class ShopDict(TypedDict):
    id: int


class Color(enum.Enum):
    RED = "red"


class Plain:
    pass


class PlainCodec:
    name = "plain"

    def encode(self, value: Plain) -> bytes:
        return b"plain"

    def decode(self, payload: bytes) -> Plain:
        return Plain()


@pytest.fixture
def registry() -> Registry:
    return Registry()


# Bindings and their lookup.


def test_finds_binding_by_type_id_and_name(registry: Registry) -> None:
    binding = registry.bind(ShopCreated, class_id=7, name="shop-created")
    assert registry.bindings[ShopCreated] is binding
    assert registry.binding_of(ShopCreated) is binding
    assert registry.by_class(7) is binding
    assert registry.by_name("shop-created") is binding
    assert (binding.type, binding.class_id, binding.name) == (ShopCreated, 7, "shop-created")


def test_unbound_type_id_and_name_are_not_found(registry: Registry) -> None:
    assert registry.by_class(7) is None
    assert registry.by_name("shop-created") is None
    assert registry.bindings.get(ShopCreated) is None
    assert ShopCreated not in registry.bindings


def test_message_decorator_binds_and_returns_the_class(registry: Registry) -> None:
    @registry.message(class_id=1, codec="msgpack")
    @dataclasses.dataclass
    class Opened:
        id: int

    @registry.message
    class Closed(msgspec.Struct):
        id: int

    assert isinstance(Opened, type)
    assert registry.binding_of(Opened).class_id == 1
    assert registry.binding_of(Opened).codec.name == "msgpack"
    assert registry.binding_of(Closed).codec.name == "json"
    assert Opened(7) == registry.bindings[Opened].decode(
        registry.bindings[Opened].encode(Opened(7))
    )


def test_binding_by_id_has_no_name(registry: Registry) -> None:
    assert registry.bind(ShopCreated, class_id=7).name is None


def test_default_class_name_is_the_qualified_name(registry: Registry) -> None:
    binding = registry.bind(ShopCreated)
    assert (binding.class_id, binding.name) == (None, f"{__name__}.ShopCreated")
    assert registry.by_name(f"{__name__}.ShopCreated") is binding


def test_class_of_main_needs_an_explicit_name(registry: Registry) -> None:
    local = type("ShopCreated", (msgspec.Struct,), {"__module__": "__main__"})
    with pytest.raises(ValueError, match=r"__main__\.ShopCreated .* name=\"shop-created\"$"):
        registry.bind(local)
    assert registry.bind(local, name="shop-created").class_id is None


@given(id=st.integers(-(2**63), 2**63 - 1))
def test_binding_decodes_what_it_encodes(id: int) -> None:
    registry = Registry()
    registry.bind(ShopCreated, class_id=7)
    binding = registry.bindings[type(ShopCreated(id))]
    assert binding.decode(binding.encode(ShopCreated(id))) == ShopCreated(id)


def test_encode_of_a_binding_is_the_library_function(registry: Registry) -> None:
    binding = registry.bind(ShopCreated, class_id=7)
    assert type(binding.encode) is type(msgspec.json.Encoder().encode)


def test_decode_error_of_a_binding_names_the_class(registry: Registry) -> None:
    binding = registry.bind(ShopCreated, class_id=7, name="shop-created")
    with pytest.raises(DecodeError) as caught:
        binding.decode(b'{"id":"x"}')
    error = caught.value
    assert str(error) == (
        f"a message of class 7 'shop-created' cannot be decoded as {__name__}.ShopCreated "
        "by the json codec: "
        'ValidationError: Expected `int`, got `str` - at `$.id`; its payload is b\'{"id":"x"}\''
    )
    assert (error.class_id, error.class_name, error.type) == (7, "shop-created", ShopCreated)


def test_custom_codec_works_for_any_class(registry: Registry) -> None:
    codec = PlainCodec()
    binding: Binding[Plain] = registry.bind(Plain, class_id=7, codec=codec)
    assert binding.codec is codec
    assert binding.encode(Plain()) == b"plain"
    assert isinstance(binding.decode(b"plain"), Plain)
    binding.prepare()


class Unfinished(msgspec.Struct):
    missing: Never_defined  # type: ignore[name-defined]  # noqa: F821


def test_prepare_raises_errors_of_the_type(
    registry: Registry,
) -> None:
    registry.bind(ShopCreated, class_id=7).prepare()
    binding = registry.bind(Unfinished, class_id=8)
    with pytest.raises(NameError, match="Never_defined"):
        binding.prepare()


def test_binding_is_immutable(registry: Registry) -> None:
    binding = registry.bind(ShopCreated, class_id=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        binding.class_id = 8  # type: ignore[misc]
    assert not hasattr(binding, "__dict__")


# Types are exact.


def test_subclass_is_not_bound(registry: Registry) -> None:
    registry.bind(ShopCreated, class_id=7)
    for look_up in (registry.binding_of, registry.bindings.__getitem__):
        with pytest.raises(UnboundTypeError) as caught:
            look_up(type(ChainCreated(1)))
        assert str(caught.value) == (
            f"{__name__}.ChainCreated is bound to no class (its base class "
            f"{__name__}.ShopCreated is, but a binding is not inherited); "
            "bind it once, before its first use: "
            'registry.bind(ChainCreated, name="chain-created")'
        )
    registry.bind(ChainCreated, class_id=8)
    assert registry.binding_of(ShopCreated).class_id == 7
    assert registry.binding_of(ChainCreated).class_id == 8


def test_bind_call_in_the_error_message_works(registry: Registry) -> None:
    for type_, name in (
        (ShopCreated, "shop-created"),
        (HTTPProblem2Found, "http-problem2-found"),
        (Page, "page"),
    ):
        with pytest.raises(UnboundTypeError) as caught:
            registry.binding_of(type_)
        line = str(caught.value).rpartition(": ")[2]
        exec(line, {**globals(), "registry": registry})
        assert registry.binding_of(type_).name == name


def test_error_message_for_default_registry_uses_public_name() -> None:
    with pytest.raises(
        UnboundTypeError, match=r": simplebus\.bind\(Plain, name=\"plain\", codec=…"
    ):
        DEFAULT_REGISTRY.binding_of(Plain)


def test_error_message_for_a_local_type_uses_its_local_name(registry: Registry) -> None:
    class Local(msgspec.Struct):
        pass

    with pytest.raises(UnboundTypeError, match=r"<locals>\.Local is bound .*\.bind\(Local, name="):
        registry.binding_of(Local)


def test_unbound_type_error_is_a_bus_error_and_a_type_error(registry: Registry) -> None:
    with pytest.raises(BusError):
        registry.binding_of(ShopCreated)
    with pytest.raises(TypeError):
        registry.binding_of(ShopCreated)


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (int, "int is a builtin type and cannot be bound.*class Temperature"),
        (str, "str is a builtin type.*or publish bytes with class_id=…"),
        (type(None), "NoneType is a builtin type"),
        (object, "object is a builtin type"),
        (dict, r"dict is a builtin type.*\(a TypedDict's values are dicts: name their type\)"),
        (list[int], "list is a builtin type"),
        (
            bytes,
            r"bytes needs no binding: publish it with its class.*publish\(payload, class_id=…\)",
        ),
        (memoryview, "memoryview needs no binding"),
        (type(ShopCreated), "got a class, expected a value; publish an instance"),
        (ShopCreated | ShopClosed, "got .*ShopClosed; for a union, bind each member"),
        ("ShopCreated", "a message's type is a class, got 'ShopCreated'"),
    ],
)
def test_builtin_types_cannot_be_bound(registry: Registry, type_: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        registry.bind(type_, class_id=7)
    with pytest.raises(UnboundTypeError, match=text):
        registry.binding_of(type_)
    assert not registry.bindings


def test_type_without_default_codec_needs_codec_argument(registry: Registry) -> None:
    with pytest.raises(TypeError, match="Color has no default codec; select 'json'"):
        registry.bind(Color, class_id=7)
    binding = registry.bind(Color, class_id=7, codec="json")
    assert binding.decode(binding.encode(Color.RED)) is Color.RED


def test_typed_dict_is_found_by_type_but_not_by_value(registry: Registry) -> None:
    binding = registry.bind(ShopDict, class_id=7)
    assert registry.binding_of(ShopDict) is binding
    assert binding.decode(binding.encode({"id": 1})) == {"id": 1}
    with pytest.raises(UnboundTypeError, match="a TypedDict's values are dicts"):
        registry.bindings[type(ShopDict(id=1))]


def test_generic_type_is_found_with_arguments_and_by_value(registry: Registry) -> None:
    binding = registry.bind(Page[int], class_id=7)
    assert registry.binding_of(Page[int]) is binding
    assert registry.bindings[type(Page([1]))] is binding
    assert registry.bind(Page[int], class_id=7) is binding
    with pytest.raises(DecodeError, match=r"cannot be decoded as .*Page\[int\] by the json codec"):
        binding.decode(b'{"items":["x"]}')


def test_generic_type_is_bound_with_one_set_of_arguments(registry: Registry) -> None:
    registry.bind(Page[int], class_id=7)
    expected = r"Page\[str\] cannot be bound beside .*Page\[int\]: at run time their values have"
    with pytest.raises(ValueError, match=expected):
        registry.bind(Page[str], class_id=8)
    with pytest.raises(UnboundTypeError, match=expected):
        registry.binding_of(Page[str])
    assert registry.bind(Shops, class_id=8).type is Shops


# Conflicting bindings.


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({"class_id": 7}, "class id 7"),
        ({"class_id": 7, "name": "shop-created"}, "class id 7"),
        ({"class_id": 8, "name": "shop-created"}, "class name 'shop-created'"),
        ({"name": "shop-created"}, "class name 'shop-created'"),
    ],
)
def test_id_or_name_is_bound_to_one_type(
    registry: Registry, options: dict[str, Any], shared: str
) -> None:
    binding = registry.bind(ShopCreated, class_id=7, name="shop-created")
    with pytest.raises(ValueError, match="already") as caught:
        registry.bind(ShopClosed, **options)
    assert str(caught.value) == (
        f"{shared} is bound to {__name__}.ShopCreated already, and cannot be bound to "
        f"{__name__}.ShopClosed too"
    )
    assert registry.by_class(7) is binding
    assert ShopClosed not in registry.bindings


def test_binding_again_in_the_same_way_changes_nothing(registry: Registry) -> None:
    binding = registry.bind(ShopCreated, class_id=7)
    assert registry.bind(ShopCreated, class_id=7) is binding
    assert registry.bind(ShopCreated, class_id=7, codec="json") is binding
    codec = PlainCodec()
    plain = registry.bind(Plain, name="plain", codec=codec)
    assert registry.bind(Plain, name="plain", codec=codec) is plain


@pytest.mark.parametrize(
    "options",
    [
        {"class_id": 8},
        {"class_id": 7, "name": "shop-created"},
        {"name": "shop-created"},
        {"class_id": 7, "codec": "msgpack"},
        {"class_id": 7, "codec": PlainCodec()},
    ],
)
def test_rejects_second_binding_of_a_type(registry: Registry, options: dict[str, Any]) -> None:
    registry.bind(ShopCreated, class_id=7)
    with pytest.raises(ValueError, match="is bound as class_id=7, name=None, codec='json' already"):
        registry.bind(ShopCreated, **options)
    assert registry.binding_of(ShopCreated).class_id == 7
    assert registry.by_class(8) is None


def test_registries_are_independent() -> None:
    first_registry, second_registry = Registry(), Registry()
    first_registry.bind(ShopCreated, class_id=7)
    second_registry.bind(ShopClosed, class_id=7)
    assert ShopClosed not in first_registry.bindings
    assert not DEFAULT_REGISTRY.bindings.keys() & {ShopCreated, ShopClosed}


def test_bind_and_message_use_the_default_registry() -> None:
    assert module.bind == DEFAULT_REGISTRY.bind
    assert module.message == DEFAULT_REGISTRY.message


# Redefined classes.


def run_source_again(shops: ModuleType, source: str) -> Any:
    """Run a module's source again, as a reload and a notebook do."""
    exec("from __future__ import annotations\nimport msgspec\n" + source, shops.__dict__)
    return shops.Shop


@pytest.fixture
def shops(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a registry."""
    shops_module = ModuleType("shops")
    shops_module.__dict__["registry"] = registry
    monkeypatch.setitem(sys.modules, "shops", shops_module)
    return shops_module


def test_redefined_class_takes_over_the_binding(registry: Registry, shops: ModuleType) -> None:
    source = "@registry.message(class_id={})\nclass Shop(msgspec.Struct):\n    id: int\n"
    first = run_source_again(shops, source.format(7))
    second = run_source_again(shops, source.format(7))
    assert first is not second
    assert registry.binding_of(second).class_id == 7
    assert first not in registry.bindings
    third_type = run_source_again(shops, source.format(8))
    assert set(registry.bindings) == {third_type}
    assert registry.by_class(7) is None


def test_class_bound_after_redefinition_takes_over_the_binding(
    registry: Registry, shops: ModuleType
) -> None:
    source = "class Shop(msgspec.Struct):\n    id: int\nregistry.bind(Shop, name='shop')\n"
    run_source_again(shops, source)
    second = run_source_again(shops, source)
    assert set(registry.bindings) == {second}
    assert registry.by_name("shop") is registry.bindings[second]


def test_rejected_binding_of_a_redefined_class_changes_nothing(
    registry: Registry, shops: ModuleType
) -> None:
    registry.bind(ShopCreated, class_id=8)
    source = "@registry.message(class_id={})\nclass Shop(msgspec.Struct):\n    id: int\n"
    first = run_source_again(shops, source.format(7))
    with pytest.raises(ValueError, match=r"class id 8 is bound to .*ShopCreated already"):
        run_source_again(shops, source.format(8))
    assert registry.binding_of(first).class_id == 7


def test_two_classes_of_the_same_name_are_separate(registry: Registry) -> None:
    def create_type() -> type[Any]:
        class Shop(msgspec.Struct):
            pass

        return Shop

    registry.bind(create_type(), class_id=7)
    with pytest.raises(ValueError, match=r"class id 7 is bound to .*Shop already"):
        registry.bind(create_type(), class_id=7)
    assert registry.bind(create_type(), class_id=8).class_id == 8


# Invalid requests.


@pytest.mark.parametrize(
    ("attempt", "raised", "text"),
    [
        (lambda r: r.bind(ShopCreated, class_id=65536), ValueError, "0 to 65535, got 65536"),
        (lambda r: r.bind(ShopCreated, class_id=-1), ValueError, "0 to 65535, got -1"),
        (lambda r: r.bind(ShopCreated, class_id=True), ValueError, "0 to 65535, got True"),
        (lambda r: r.bind(ShopCreated, class_id="7"), ValueError, "0 to 65535, got '7'"),
        (lambda r: r.bind(ShopCreated, name=""), ValueError, "printable text .* got ''"),
        (lambda r: r.bind(ShopCreated, name="a b"), ValueError, "without spaces, got 'a b'"),
        (lambda r: r.bind(ShopCreated, name="a\n"), ValueError, r"printable text .* got 'a\\n'"),
        (lambda r: r.bind(ShopCreated, name=7), ValueError, "printable text .* got 7"),
        (lambda r: r.bind(ShopCreated, codec="yaml"), ValueError, "there is no codec 'yaml'"),
        (lambda r: r.bind(ShopCreated, codec=7), TypeError, "an object with name.*, got 7"),
        (lambda r: r.bind(Plain, codec=PlainCodec), TypeError, "an object with name.*, got <class"),
        (lambda r: r.bind(Plain), TypeError, "no codec takes .*Plain: json and msgpack take"),
        (lambda r: r.bind(Plain, codec="protobuf"), TypeError, "the protobuf codec does not take"),
    ],
)
def test_rejected_binding_leaves_no_trace(
    registry: Registry, attempt: Callable[[Registry], object], raised: type[Exception], text: str
) -> None:
    with pytest.raises(raised, match=text):
        attempt(registry)
    assert not registry.bindings


@pytest.mark.parametrize("class_id", [0, 65535])
def test_binds_lowest_and_highest_class_id(registry: Registry, class_id: int) -> None:
    assert registry.bind(ShopCreated, class_id=class_id).class_id == class_id


def test_repr_of_a_registry_counts_types(registry: Registry) -> None:
    registry.bind(Page[int], class_id=7)
    assert repr(registry) == "<Registry of 1 types>"
