"""Entry module of an agent: it starts the fork server, and then imports and runs the agent.

A cluster on this machine runs `python -m megascale.resilience.agent.main --folder FOLDER --node NAME ...`. On other
machines attach.py runs this command. Both processes import modules for about a second, and the next attempt waits for
both. Started in this order, they import at the same time, so this module imports little before the start.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megascale.resilience.agent.fork_server_process import LOG_FILE, TRAINER_MODULES, start_fork_server


def main() -> None:
    """Run the agent from the command line that a cluster uses. Users run `megascale agent`."""
    parser = argparse.ArgumentParser(description="Agent of one node.")
    parser.add_argument("--node", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--pod", default="")
    parser.add_argument("--preload", action="store_true", help="resilience.preload of the job")
    arguments = parser.parse_args()
    fork_server = None
    if arguments.preload:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        fork_server = start_fork_server(arguments.folder / LOG_FILE, TRAINER_MODULES)

    from megascale.resilience.agent.agent import serve

    serve(arguments.node, arguments.folder, arguments.address, arguments.pod, fork_server)


if __name__ == "__main__":
    main()
