"""The offline page in a real browser, from file://."""
