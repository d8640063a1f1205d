import pytest
import torch

from ds_stream.core import RankInfo
from ds_stream.engine.groups import choose_placement
from rings import tiny_config


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "kind", "asked", "transport", "devices"),
    [
        (0, 4, "auto", "auto", "gloo", ["cpu"] * 4),
        (4, 2, "cpu", "auto", "gloo", ["cpu"] * 2),
        (4, 4, "auto", "auto", "nccl", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, 4, "cuda", "host_staged", "host_staged", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (1, 4, "auto", "auto", "host_staged", ["cuda:0"] * 4),
        (2, 4, "auto", "auto", "host_staged", ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
    ],
)
def test_ranks_find_their_device_and_transport(
    num_gpus: int, num_ranks: int, kind: str, asked: str, transport: str, devices: list[str], monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config = tiny_config(device={"kind": kind, "transport": asked}).stream
    places = [choose_placement(config, RankInfo(rank, num_ranks, rank, num_ranks)) for rank in range(num_ranks)]
    assert [str(place.device) for place in places] == devices
    assert {place.transport for place in places} == {transport}


@pytest.mark.parametrize(
    ("num_gpus", "device", "message"),
    [
        (0, {"kind": "cuda"}, "no GPU is visible"),
        (0, {"kind": "auto", "transport": "nccl"}, "ranks run on the CPU"),
        (1, {"kind": "auto", "transport": "nccl"}, "2 ranks share GPUs"),
        (2, {"kind": "auto", "transport": "gloo"}, "gloo cannot carry CUDA tensors"),
    ],
)
def test_what_cannot_be_had_is_an_error(num_gpus: int, device: dict, message: str, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ValueError, match=message):
        choose_placement(tiny_config(device=device).stream, RankInfo(0, 2, 0, 2))
