"""Recordings without a line of code: by the variable `MODTRACE`, or by `modtrace run`.

`MODTRACE=trace.pftrace python train.py` records a script that imports modtrace and saves at its end;
`MODTRACE=run-%r.modtrace` keeps a ring file. Or give `path` and the options of `modtrace.record` by name, as text:
`MODTRACE="ring=run-%r.modtrace,path=run-%r.pftrace,capacity=4000000,on_signal=SIGUSR1,shapes=true"`.
`modtrace run` has the same options with dashes (`--on-signal SIGUSR1`), and `-o` for the path.

In a path `%r` is the rank, `%p` the process id, `%h` a hash of the host's name, and `%%` a percent sign. Where several
ranks run, a path without `%r` and `%p` gets the rank before its suffixes: `trace.json.gz` → `trace.rank3.json.gz`.

The recording starts when torch is imported. If the script starts a recording of its own, that replaces this one.
Child processes are recorded too, each from its first call of a module on, to `trace.pid4711.json.gz`.
"""

from .auto_recording import AutoRecording, parse_variable, start_from_variable

__all__ = ["AutoRecording", "parse_variable", "start_from_variable"]
