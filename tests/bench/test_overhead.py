"""What the host spends on a tick stays small."""

import json
import sys
from pathlib import Path

from ds_stream.bench.command import main
from forked import start_forked, wait_for

TINY = Path(__file__).parents[2] / "ds_configs" / "tiny.json"


def test_the_controller_takes_less_than_300_us_a_tick(tmp_path: Path):
    found = []
    # A machine that is busy with other things gets a second and a third chance.
    for attempt in range(3):
        path = tmp_path / f"{attempt}.json"
        # In a process of its own, which the run's process group ends with.
        arguments = ["--overhead", "--json", str(path)]
        assert wait_for(start_forked(1, lambda _: sys.exit(main(arguments, TINY)), join=False), 60) == {}  # noqa: B023
        found.append(json.loads(path.read_text()))
        assert found[-1]["host_us"] > found[-1]["controller_us"] > 0
        if found[-1]["controller_us"] < 300:
            return
    raise AssertionError(f"too slow, three times: {found}")
