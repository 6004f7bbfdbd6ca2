"""Clocks against each other: what one shows when another shows t, and how a job's hosts measure that.

`ClockMap` is for any two clocks. A host's clock is its CLOCK_MONOTONIC as seen in one time namespace; the processes
that share it share its measurements. Nothing here needs torch: `track.job_clocks` measures while a recording runs, and
readers of rings use the results.
"""

from .clock_map import MAX_RATE as MAX_RATE
from .clock_map import ClockMap as ClockMap
from .clock_map import Offset as Offset
from .clock_map import Reading as Reading
from .host_clocks import ClockTree as ClockTree
from .host_clocks import Measurement as Measurement
from .host_clocks import clock_id as clock_id
from .host_clocks import clock_in as clock_in
from .host_clocks import measurement_record as measurement_record
from .host_clocks import measurements_in as measurements_in
from .host_clocks import parent_number as parent_number
