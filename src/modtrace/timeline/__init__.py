"""Timelines: the spans of a recording, built from a ring's events, selected and summarized."""

from __future__ import annotations

from ..ring.event_text import CollectiveName as CollectiveName
from ..ring.event_text import RangeCategory as RangeCategory
from .collectives import Collective as Collective
from .collectives import Collectives as Collectives
from .collectives import Group as Group
from .contents import BackwardPass as BackwardPass
from .contents import CounterSeries as CounterSeries
from .contents import GpuWork as GpuWork
from .contents import Mark as Mark
from .contents import MarkKind as MarkKind
from .contents import Name as Name
from .contents import Process as Process
from .contents import Range as Range
from .contents import Stats as Stats
from .contents import Track as Track
from .decode.analysis import RingAnalysis as RingAnalysis
from .decode.from_ring import build_timeline as build_timeline
from .decode.open_calls import AFTER_BACKWARD as AFTER_BACKWARD
from .decode.open_calls import OpenCall as OpenCall
from .decode.open_calls import ThreadStack as ThreadStack
from .decode.pieces import ReadRing as ReadRing
from .decode.pieces import RingPieces as RingPieces
from .join import OnePiece as OnePiece
from .select import launching_spans as launching_spans
from .slices import BACKWARD as BACKWARD
from .slices import FORWARD as FORWARD
from .slices import PHASES as PHASES
from .slices import RECOMPUTE as RECOMPUTE
from .slices import Phase as Phase
from .slices import Slices as Slices
from .slices import TrackKind as TrackKind
from .summary import ModuleTimes as ModuleTimes
from .summary import StepTimes as StepTimes
from .summary import Summary as Summary
from .summary.overview import OperatorTotals as OperatorTotals
from .timeline import Span as Span
from .timeline import Spans as Spans
from .timeline import Timeline as Timeline

Pieces = OnePiece | RingPieces
"""A timeline in pieces of whole steps, in order, since all of it may not fit in memory.

pieces   a timeline for each part, with its modules and the ranges that are open in it
rest     everything except modules, after the last piece
"""
