"""The drop-in trackers: which modules run now."""
