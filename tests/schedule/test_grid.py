from ds_stream.partition import Ring
from ds_stream.schedule.grid import describe_schedule, plan_backlog, render_grid

DESIGN_GRID = """\
tick      0   1   2      3      4      5      6
stage 0   0a  1a  0b+2a  1b+3a  2b+4a  3b+5a  4b+6a
stage 1   .   0a  1a     0b+2a  1b+3a  2b+4a  3b+5a
finished  .   .   .      0      1      2      3"""


def test_grid_of_two_stages_two_steps_two_rows():
    plans = plan_backlog(num_stages=2, num_passes=2, lead=0, max_rows=2, num_chunks=9, num_ticks=7)
    assert render_grid(plans, Ring(0, 1), num_passes=2) == DESIGN_GRID


def test_description_names_latency_and_throughput():
    text = describe_schedule(4, Ring(0, 3), num_passes=4, lead=1, max_rows=1)
    assert text.endswith("latency 16 ticks, throughput 0.2 chunks a tick")


def test_stages_of_the_vae_alone_are_named_and_not_drawn():
    text = describe_schedule(4, Ring(1, 2), num_passes=2, lead=0, max_rows=2)
    lines = DESIGN_GRID.replace("stage 1", "stage 2").replace("stage 0", "stage 1").splitlines()
    assert all(any(line in drawn for drawn in text.splitlines()) for line in lines)
    assert text.endswith(
        "latency 4 ticks, throughput 1 chunks a tick\nstages outside the ring, with the VAE alone: [0, 3]"
    )
