"""`python -m modtrace` is the `modtrace` command."""

from .cli import main

if __name__ == "__main__":
    main()
