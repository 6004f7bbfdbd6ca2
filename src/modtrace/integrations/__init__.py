"""Recordings that others start: `auto_recording` by `MODTRACE=…` or `modtrace run`, and callbacks for trainers.

The callbacks have one module for each library: `transformers`, `lightning`.

Nothing of these libraries is imported before the module that is named after it.
"""
