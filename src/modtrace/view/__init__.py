"""Show a timeline: the built offline page (`viewer.html`, made by `scripts/viewer`), a server for it, a browser."""
