"""Everything that crosses a contract survives msgpack."""

from __future__ import annotations

import enum
import importlib
import pkgutil
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import furnace.contracts

STRUCTS = sorted(
    (
        value
        for name in furnace.contracts.__all__
        if isinstance(value := getattr(furnace.contracts, name), type) and issubclass(value, msgspec.Struct)
    ),
    key=lambda struct: struct.__name__,
)
UNIONS = {"Event": furnace.contracts.Event, "Input": furnace.contracts.Input}

# msgpack's integers, from the least signed to the greatest unsigned one.
INTEGERS = st.integers(-(2**63), 2**64 - 1)


def values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a type that msgspec can inspect."""
    match kind:
        # Opaque to furnace (`Chunk.state`, `Row.mask`); whoever sends one sends a number.
        case msgspec.inspect.AnyType():
            return INTEGERS
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            return INTEGERS
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)
        case msgspec.inspect.StrType():
            return st.text()
        case msgspec.inspect.BytesType():
            return st.binary()
        case msgspec.inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case msgspec.inspect.FrozenSetType(item_type=item):
            return st.frozensets(values(item), max_size=3)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case msgspec.inspect.EnumType(cls=cls):
            return st.sampled_from(list[enum.Enum](cls))
        case msgspec.inspect.StructType():
            return structs(kind)
        case _:
            raise TypeError(f"no strategy for {kind}: add one")


def structs(kind: msgspec.inspect.StructType) -> st.SearchStrategy[Any]:
    """Instances of a Struct; each field that has a default is sometimes left out."""
    required = {field.name: field for field in kind.fields if field.required}
    optional = {field.name: field for field in kind.fields if not field.required}

    # Deferred, because a Struct may hold others of its kind.
    def fields() -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries(
            {name: values(field.type) for name, field in required.items()},
            optional={name: values(field.type) for name, field in optional.items()},
        )

    return st.deferred(fields).map(lambda chosen: kind.cls(**chosen))


def instances(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    kind = msgspec.inspect.type_info(struct)
    assert isinstance(kind, msgspec.inspect.StructType)
    return structs(kind)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
@given(data=st.data())
def test_every_exported_struct_round_trips_through_msgpack(struct: type[msgspec.Struct], data: st.DataObject) -> None:
    value = data.draw(instances(struct))

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=struct) == value


@pytest.mark.parametrize("name", UNIONS)
@given(data=st.data())
def test_a_member_of_a_union_comes_back_as_its_own_type(name: str, data: st.DataObject) -> None:
    union = UNIONS[name]
    value = data.draw(st.sampled_from(union.__args__).flatmap(instances))

    back = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=union)

    assert type(back) is type(value)
    assert back == value


def test_every_struct_of_the_contracts_is_exported() -> None:
    modules = [
        importlib.import_module(f"furnace.contracts.{module.name}")
        for module in pkgutil.iter_modules(furnace.contracts.__path__)
    ]
    defined = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
    }

    assert defined == set(STRUCTS)


def test_a_request_written_by_an_older_furnace_gets_defaults_for_new_fields() -> None:
    old = msgspec.msgpack.encode({"input": {"type": "raw_text", "text": "once"}})

    request = msgspec.msgpack.decode(old, type=furnace.contracts.GenerateRequest)

    assert request == furnace.contracts.GenerateRequest.completion("once")


def test_a_request_written_by_a_newer_furnace_is_read_without_the_unknown_fields() -> None:
    new = msgspec.msgpack.encode({"input": {"type": "raw_text", "text": "once"}, "from_the_future": 1})

    request = msgspec.msgpack.decode(new, type=furnace.contracts.GenerateRequest)

    assert request == furnace.contracts.GenerateRequest.completion("once")
