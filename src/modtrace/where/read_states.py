"""The states of many ranks, and the dumps of their flight recorders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .flight_recorder import FlightRecord, read_flight_record
from .parallel_reader import ParallelReader
from .rank_state import RankState, read_rank_state

__all__ = ["States", "read_states"]


class States(NamedTuple):
    """What some files say.

    Attributes:
        ranks: the state of each ring that could be read, in the order of the files.
        records: the dumps of flight recorders.
        errors: what is wrong with the files that could not be read.
    """

    ranks: list[RankState]
    records: list[FlightRecord]
    errors: list[str]


def read_states(reader: ParallelReader, rings: Sequence[str], dumps: Sequence[str] = ()) -> States:
    """Read the state of each ring, and each dump of a flight recorder."""
    states, ring_errors = reader.read(read_rank_state, rings)
    records, dump_errors = reader.read(read_flight_record, dumps)
    return States(states, records, [*ring_errors, *dump_errors])
