"""A job that runs, read from outside by its rings: what each process is in, what a step takes, what was slow.

- `where` is `modtrace.where`: `rank_state`: what a process is in; `hangs`: who waits for whom, in words of `places`.
- `top` is the screen of `modtrace top`: `follow` reads the ends of rings and says what they did in the last seconds.
- `watch` is `modtrace watch`, a process of its own: `follow` reads the new ends of rings, `triggers` judges them,
  `windows` keeps what is around them, `whole_run` sums up.
"""
