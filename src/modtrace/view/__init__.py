"""Looking at a timeline: the built offline page (`viewer.html`, made by `scripts/viewer` from `viewer/`)."""
