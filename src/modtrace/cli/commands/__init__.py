"""The subcommands: each module here is the one of its name, and `convert.py` has `convert_command`."""
