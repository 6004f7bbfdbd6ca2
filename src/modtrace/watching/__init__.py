"""The watcher: a process of its own that reads rings, and keeps the window around what is slow; see its README."""
