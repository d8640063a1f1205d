"""``python -m ds_stream.model.weights inspect FILE``: what a checkpoint is, and which config fits it."""

import argparse
import os
import sys
from pathlib import Path

from ds_stream.core import EXIT_USAGE


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ds_stream.model.weights", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="say what a file is, its size, which config fits, what is missing")
    command.add_argument("path", type=Path, nargs="+", metavar="FILE", help="a file of weights, or a folder of them")
    options = parser.parse_args(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from ds_stream.model.weights.inspect import inspect

    for path in options.path:
        try:
            print(inspect(path))
        except ValueError as error:
            print(f"ds_stream: {error}", file=sys.stderr)
            return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
