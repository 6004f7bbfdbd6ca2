"""The subcommands: `convert.py` has `convert_command`, and so on."""
