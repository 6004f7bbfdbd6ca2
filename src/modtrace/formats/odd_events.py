"""Rewrites events of a profile as torch.profiler writes them, so that readers know one kind, whatever wrote it."""

import math
from typing import Any

from .._numbering import Numbering
from .chrome_values import MAX_TIME_US, TrackKey, is_int64


class OddEvents:
    """Rewrites events as torch.profiler writes them; leaves out and counts what cannot be an event.

    A slice is an X, or a B and the E after it on its track, which is after those in between. A time is a number or the
    text of one, an id anything: what has no pid or tid is of 0, as readers of JSON have it.

    Attributes:
        tracks: the number of a track by pid and tid as an event has them.
        malformed: how many are no events: no object, or without what every event has.
        without_duration: slices that say no duration; they have 0.
    """

    def __init__(self) -> None:
        self.tracks = TrackNumbers()
        self.malformed = self.without_duration = 0
        self._open: dict[int, list[dict[str, Any]]] = {}

    def notes(self) -> list[str]:
        """Return what the user should know of them."""
        kinds = {
            "are no events: no object, or without a ph or a time; no track shows them": self.malformed,
            "have no dur: here they are 0 ns long, and viewers drop them": self.without_duration,
            "begin and never end (B without E): no track shows them": sum(map(len, self._open.values())),
        }
        return [f"{count:,} of the profiler's events {what}" for what, count in kinds.items() if count]

    def ordinary(self, event: Any) -> dict[str, Any] | None:
        """Return the event as it would be written; None if it says nothing, or is the begin of a slice."""
        try:
            phase, args = event["ph"], event.get("args")
            fields = {**event, "args": args if isinstance(args, dict) else {}, "name": str(event.get("name", ""))}
            if not isinstance(event.get("cat"), str | None):
                fields["cat"] = str(event["cat"])
            fields["pid"], fields["tid"] = _id(event.get("pid")), _id(event.get("tid"))
            if phase != "M":
                fields["ts"] = parse_microseconds(event["ts"])
            if phase in ("B", "E"):
                opened = self._open.setdefault(self.tracks[fields["pid"], fields["tid"]], [])
                if phase == "B":
                    opened.append(fields)
                    return None
                begin = opened.pop()
                fields = {**begin, "ph": "X", "dur": fields["ts"] - begin["ts"], "args": begin["args"] | fields["args"]}
            elif phase == "X":
                self.without_duration += "dur" not in event
                fields["dur"] = parse_microseconds(event.get("dur", 0))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError):
            self.malformed += 1
            return None
        return fields


class TrackNumbers(dict[tuple[Any, Any], int]):
    """The number of a track by pid and tid as an event has them; `known` has each track once."""

    def __init__(self) -> None:
        super().__init__()
        self.known = Numbering[TrackKey]()

    def __missing__(self, ids: tuple[Any, Any]) -> int:
        pid, tid = ids
        track = self[ids] = self.known[_id(pid), _id(tid)]
        return track


def _id(value: Any) -> int | str:
    """Return an id as a whole number of 64 bits or a text; 0 if there is none."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if is_int64(value) else 0 if value is None else str(value)


def parse_microseconds(value: Any) -> float:
    """Return a time, which may be text.

    Raises:
        ValueError: it is no time.
        TypeError: it is neither number nor text.
    """
    number = float(value) if not isinstance(value, bool) else math.nan
    if not abs(number) < MAX_TIME_US:
        raise ValueError(value)
    return number
