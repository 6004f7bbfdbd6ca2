"""Callbacks for the trainers of other libraries, one module for each: `transformers`, `lightning`.

Nothing of these libraries is imported before the module that is named after it.
"""
