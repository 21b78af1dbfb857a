"""`megascale` and `python -m megascale`: loads the command line, and exits cleanly if it is interrupted meanwhile."""

import sys

from megascale.core.python_process import leave_working_directory


def main() -> None:
    """Entry point. Loading takes some tenths of a second, in which people press Ctrl-C, too."""
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
