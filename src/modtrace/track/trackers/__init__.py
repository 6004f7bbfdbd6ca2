"""Drop-in trackers in place of torch's: which modules run now. See README.md."""
