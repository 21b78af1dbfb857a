"""`megascale` and `python -m megascale`: load and run the command line, with a clean end on an early Ctrl-C."""

import sys

from megascale.core.python_process import leave_working_directory


def main() -> None:
    """Run the command line. An interruption while it is loading, which takes some tenths of a second, exits cleanly."""
    leave_working_directory()
    try:
        from megascale.cli.main import main as run
    except KeyboardInterrupt:
        from megascale.errors import EXIT_INTERRUPTED

        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
