"""Writing a merged trace: as JSON beside the profiler's own bytes, or in Perfetto's format."""
