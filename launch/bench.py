"""Measure settings, or forecast a machine: ``python launch/bench.py``. See ``--help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_stream.bench.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent.parent / "ds_configs" / "tiny.json"))
