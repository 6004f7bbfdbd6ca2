"""The loop of the watcher: finds rings, looks at each once a second, and ends when their processes have."""

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from .._errors import RingError
from ..ring import find_rings
from .follow import Look, RingFollower
from .triggers import Condition, Triggers
from .windows import WindowKeeper


class LookSink(Protocol):
    """What takes the steps of all rings."""

    def add_look(self, follower: RingFollower, look: Look, /) -> object:
        """Take what is new in a ring."""

    def close(self) -> object:
        """End, after the last new events of all rings."""


class Watcher:
    """Watches the rings of a job.

    Args:
        paths: ring files, folders and patterns. A folder's new rings are found; a file that is named is followed until
            its process has ended, also if it is renamed.
        conditions: when a window is kept.
        keeper: keeps it.
        say: takes a line for the user.
        sinks: they take each look.
        waits: whether to wait for a ring if none is there; that of a recording is, or will never be again.
    """

    def __init__(
        self,
        paths: Sequence[str],
        conditions: Sequence[Condition],
        keeper: WindowKeeper,
        say: Callable[[str], None],
        sinks: Sequence[LookSink] = (),
        *,
        waits: bool = True,
    ) -> None:
        self._paths, self._conditions, self._keeper, self._say = paths, conditions, keeper, say
        self._sinks, self._waits = sinks, waits
        self._followers: dict[tuple[int, int], tuple[RingFollower, Triggers]] = {}
        self._named: set[str] = set()
        self._said: set[str] = set()
        self._is_short = False

    def run(self, every_s: float) -> bool:
        """Look until all processes have ended or KeyboardInterrupt comes; return whether all rings were read."""
        try:
            while self.look():
                time.sleep(every_s)
        except KeyboardInterrupt:
            pass
        self._keeper.save_ready(self._readable(), flush=True)
        for follower, _ in self._followers.values():
            if follower.missed_events:
                self._say(f"{follower.path}: {follower.missed_events:,} events were overwritten before they were read")
        self._keeper.close()
        for sink in self._sinks:
            sink.close()
        lost = [follower for follower, _ in self._followers.values() if follower.is_unread]
        for follower in lost:
            self._say(f"{follower.path}: its end was not read, as it could not be")
        self._say(f"ended: {self._keeper.kept} kept")
        return not lost

    def look(self) -> bool:
        """Look at each ring once; return whether a process still runs, or none was there yet."""
        self._find()
        for follower, triggers in self._followers.values():
            if follower.state == "ended":
                continue
            try:
                look = follower.look()
            except RingError as error:
                self._say_once(str(error))
                if follower.is_lost(error):
                    follower.state, follower.analysis = "ended", None
                continue
            for trigger in triggers.judge(follower, look):
                self._keeper.add(follower, trigger)
            for sink in self._sinks:
                sink.add_look(follower, look)
        self._keeper.save_ready(self._readable())
        if not self._followers:
            return self._waits or self._is_short
        return self._is_short or any(follower.state != "ended" for follower, _ in self._followers.values())

    def _readable(self) -> list[RingFollower]:
        return [follower for follower, _ in self._followers.values() if follower.analysis is not None]

    def _find(self) -> None:
        self._is_short = False
        try:
            rings, _, errors = find_rings(self._paths)
        except OSError as error:
            self._note_short(error)
            rings, errors = [], [str(error)]
        for path in rings:
            if path in self._named:
                continue
            try:
                status = os.stat(path)
                if (status.st_dev, status.st_ino) not in self._followers:
                    follower = RingFollower(path)
                    self._followers[status.st_dev, status.st_ino] = follower, Triggers(self._conditions)
                    self._said.clear()
            except OSError as error:
                self._note_short(error)
                errors.append(f"{path}: {error.strerror or error}")
            else:
                self._named |= {path} & set(self._paths)
        if not self._followers:
            for missing in errors:
                self._say_once(f"{missing}; waiting for it")

    def _note_short(self, error: OSError) -> None:
        """Note where rings may be there that cannot be opened now, as descriptors or memory are short."""
        self._is_short |= error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)
