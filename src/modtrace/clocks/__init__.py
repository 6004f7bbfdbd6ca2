"""Conversion of times between clocks, and how a job's hosts measure what theirs differ by.

`ClockMap` is for any two clocks. A host's clock is its CLOCK_MONOTONIC as seen in one time namespace; the processes
that share it share its measurements. Nothing here needs torch: `track.job_clocks` measures while a recording runs, and
readers of rings use the results.
"""
