"""Drop-in trackers."""
