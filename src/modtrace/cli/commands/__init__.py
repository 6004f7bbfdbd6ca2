"""The subcommands: each module here is the one of its name, and holds it as `command`."""
