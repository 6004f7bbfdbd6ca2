"""A running job, read from outside through its rings: the calls of each process, the times of steps, slow steps.

- `where` is `modtrace.where`: `rank_state` finds the open calls of a process, `hangs` the ranks that keep others
  waiting; `places` formats both.
- `top` is the screen of `modtrace top`: `follow` reads the ends of rings and computes the rates of the last seconds.
- `watch` is `modtrace watch`, a separate process: `follow` reads new events, `triggers` checks the conditions,
  `windows` saves windows, `whole_run` keeps statistics of the run.
"""
