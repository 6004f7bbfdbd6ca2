"""A map by identity that keeps no key alive."""

from __future__ import annotations

import weakref

import pytest

from modtrace._interrupts import WeakMap


class Key:
    """Equal to all others, and without a hash."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_objects_are_distinguished_by_identity() -> None:
    first, second, values = Key(), Key(), WeakMap[Key, int]()

    values[first] = 1
    values[second] = 2
    values[first] = 3

    assert (values.get(first), values.get(second), values.get(Key())) == (3, 2, None)
    assert list(values.items()) == [(first, 3), (second, 2)]


def test_a_value_goes_with_its_object() -> None:
    key, kept, values = Key(), Key(), WeakMap[Key, int]()
    values[key] = 1
    values[kept] = 2

    del key
    # Most often one of these gets the id of the old object.
    others = [Key() for _ in range(1000)]

    assert [values.get(other) for other in others] == [None] * 1000
    assert [value for _, value in values.items()] == [2]


def test_dead_objects_are_not_kept_for_long() -> None:
    kept, values = [Key() for _ in range(10)], WeakMap[Key, Key]()
    for key in kept:
        values[key] = key
    alive = []
    for _ in range(1000):
        value = Key()
        alive.append(weakref.ref(value))
        values[Key()] = value
    del value

    # The number that is checked at once, including the ten that are kept.
    assert sum(ref() is not None for ref in alive) <= 64 - 10
    assert [id(value) for _, value in values.items()] == [id(key) for key in kept]


def test_an_object_without_weak_references_is_an_error() -> None:
    with pytest.raises(TypeError):
        WeakMap[int, int]()[1] = 1
