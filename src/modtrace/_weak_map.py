"""Values by object, without a callback when an object dies."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["WeakMap"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_MIN_PRUNE_LENGTH = 64


class WeakMap(Generic[_Key, _Value]):
    """Values by object, each found as long as its object lives; objects are told apart by identity.

    The callbacks of `weakref.WeakKeyDictionary` are Python code: a signal's handler can raise in there, where the
    interpreter ignores it, and the user's Ctrl-C would be lost. Here nothing is called back: entries of dead objects go
    when there are twice as many entries as objects were alive last time.
    """

    def __init__(self) -> None:
        # By id, checked against the object itself.
        self._entries: dict[int, tuple[weakref.ref[_Key], _Value]] = {}
        self._prune_length = _MIN_PRUNE_LENGTH

    def get(self, key: _Key) -> _Value | None:
        """Return the value of an object, None where it has none."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __setitem__(self, key: _Key, value: _Value) -> None:
        """Set the value of an object.

        Raises:
            TypeError: there are no weak references to it.
        """
        if len(self._entries) >= self._prune_length:
            self._prune()
            self._prune_length = max(_MIN_PRUNE_LENGTH, 2 * len(self._entries))
        self._entries[id(key)] = weakref.ref(key), value

    def __iter__(self) -> Iterator[_Key]:
        """Yield the objects that are alive."""
        return (key for key, _ in self.items())

    def items(self) -> Iterator[tuple[_Key, _Value]]:
        """Yield the objects that are alive, and their values."""
        # A list of the keys, whose making runs no other code that may change the dictionary.
        for key_id in list(self._entries):
            entry = self._entries.get(key_id)
            key = None if entry is None else entry[0]()
            if entry is not None and key is not None:
                yield key, entry[1]

    def _prune(self) -> None:
        for key_id in list(self._entries):
            entry = self._entries.get(key_id)
            if entry is not None and entry[0]() is None:
                removed = self._entries.pop(key_id, entry)
                if removed is not entry:
                    # Another thread has set a new object's in between.
                    self._entries.setdefault(key_id, removed)
