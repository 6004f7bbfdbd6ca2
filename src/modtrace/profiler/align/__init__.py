"""The offset of a profiler's clock to ours: from sync marks, and as a band that operators prove."""
