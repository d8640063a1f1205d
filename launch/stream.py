"""Stream a video: ``deepspeed --num_gpus 4 launch/stream.py``. See ``--help``."""

import signal
import sys
from pathlib import Path

# Before any import that starts a thread: threads inherit it, and one that kept the signals open would take them from
# the thread that waits for them.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_stream.app import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent.parent / "ds_configs" / "tiny.json"))
