"""Rows of what is no span, collectives and whole backward passes: tables of the timeline, written as slices."""
