"""Recordings by other programs: `auto_recording` for `MODTRACE=…` and `modtrace run`, and callbacks for trainers.

The callbacks of a library are in a module of its name: `transformers`, `lightning`. Only that module imports it.
"""
