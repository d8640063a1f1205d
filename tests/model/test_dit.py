"""The cached, chunked, causal DiT against plain full forwards of the same weights."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from ds_stream.core import Row
from ds_stream.model.attention import KeyValue
from ds_stream.model.layers import RowBatch, RowContextFactory, latent_shape
from ds_stream.model.pipeline import StageLayers, build_all_layers
from ds_stream.settings import StreamConfig
from published import original_dit, split
from rings import CPU, embed, tiny_config
from wan_by_hand import block_causal


def dense_model(layers: StageLayers, config: StreamConfig) -> WanTransformer3DModel:
    """Diffusers' whole model with the weights of ours."""
    model = config.model
    dense = WanTransformer3DModel(
        num_attention_heads=model.num_heads,
        attention_head_dim=model.head_dim,
        in_channels=model.in_channels,
        out_channels=model.out_channels,
        text_dim=model.text_dim,
        freq_dim=model.freq_dim,
        ffn_dim=model.ffn_dim,
        num_layers=model.num_layers,
        eps=model.eps,
    ).eval()
    weights = {**layers.embed.state_dict(), **layers.by_index[config.layers.head].state_dict()}
    for block in layers.blocks:
        weights |= {f"blocks.{block.index}.{name}": value for name, value in block.block.state_dict().items()}
    dense.load_state_dict(weights, strict=True)
    return dense


def text_of(layers: StageLayers, embedding: Tensor) -> dict[int, KeyValue]:
    assert layers.embed is not None
    context = layers.embed.project_text(embedding)
    return {block.index: block.text_key_value(context) for block in layers.blocks}


@torch.no_grad()
def run_chunks(
    config: StreamConfig,
    layers: StageLayers,
    latents: Tensor,
    embedding: Tensor,
    step: int,
    num_passes_before: int = 0,
) -> Tensor:
    """Flow of each chunk of ``latents`` ``[C, all frames, h, w]`` at pass ``step``, chunk after chunk."""
    rows = RowContextFactory(config, CPU)
    caches, texts = rows.new_caches([block.index for block in layers.blocks]), text_of(layers, embedding)
    size = config.context.num_latent_frames_per_chunk
    flows = []
    for chunk, part in enumerate(latents.split(size, dim=1)):
        for earlier in range(step - num_passes_before, step + 1):
            batch = RowBatch([rows.make(Row(0, chunk, earlier, 0), caches, texts)], part[None])
            flow = layers.forward(batch, exact_rows=True).flow_RCNhw
        assert flow is not None
        flows.append(flow[0])
    return torch.cat(flows, dim=1)


@pytest.mark.parametrize("size", [(32, 32), (48, 80), (128, 256)])
@torch.no_grad()
def test_one_chunk_of_all_frames_equals_diffusers(size: tuple[int, int]):
    config = tiny_config(
        video={"height": size[0], "width": size[1]},
        context={"num_latent_frames_per_chunk": 5, "num_window_latent_frames": 5, "num_sink_latent_frames": 0},
    ).stream
    layers = build_all_layers(config, CPU)
    latents = torch.randn(latent_shape(config))
    embedding = embed(tiny_config(), "two red boats")
    ours = run_chunks(config, layers, latents, embedding, step=1)
    theirs = dense_model(layers, config)(latents[None], torch.tensor([500.0]), embedding[None]).sample[0]
    assert (ours - theirs).abs().max() < 1e-5
    assert theirs.abs().mean() > 0.1


@pytest.mark.parametrize(("frames_per_chunk", "num_chunks"), [(1, 6), (3, 4)])
@pytest.mark.parametrize("num_sinks", [0, 2])
@torch.no_grad()
def test_dense_equals_cached(frames_per_chunk: int, num_chunks: int, num_sinks: int):
    """The context pass of each chunk, in exact mode and with all context in the window, is block-causal attention."""
    num_frames = frames_per_chunk * num_chunks
    config = tiny_config(
        noise={"steps": [1000, 500], "context_pass": True},
        context={
            "lead": 2,
            "num_latent_frames_per_chunk": frames_per_chunk,
            "num_window_latent_frames": num_frames,
            "num_sink_latent_frames": num_sinks,
        },
    ).stream
    layers = build_all_layers(config, CPU)
    channels, _, height, width = latent_shape(config)
    latents = torch.randn(channels, num_frames, height, width)
    embedding = embed(tiny_config(), "two red boats")
    # The denoising passes run too: what they leave in the cache must not be seen.
    ours = run_chunks(config, layers, latents, embedding, step=2, num_passes_before=2)
    weights, heads = original_dit(split(layers)[0]), config.model.num_heads
    theirs = block_causal(weights, heads, latents, 0.0, embedding, frames_per_chunk)
    assert (ours - theirs).abs().max() < 1e-5
    assert theirs.abs().mean() > 0.1


@torch.no_grad()
def test_layers_of_the_real_size_equal_diffusers_and_the_formulas():
    """Two blocks of T2V-1.3B on few tokens: all at once as diffusers, and causal in exact mode as by hand."""
    size = {"num_layers": 2, "num_heads": 12, "head_dim": 128, "ffn_dim": 8960, "freq_dim": 256}
    context = {"num_latent_frames_per_chunk": 3, "num_window_latent_frames": 9, "num_sink_latent_frames": 0}
    config = tiny_config(
        model={**size, "text_dim": 64},
        noise={"steps": [1000, 500], "context_pass": True},
        context={**context, "lead": 2},
    )
    embedding = embed(config, "two red boats")
    layers = build_all_layers(config.stream, CPU)
    channels, _, height, width = latent_shape(config.stream)
    latents = torch.randn(channels, 6, height, width)
    theirs = dense_model(layers, config.stream)(latents[None, :, :3], torch.tensor([500.0]), embedding[None]).sample[0]
    ours = run_chunks(config.stream, layers, latents[:, :3], embedding, step=1)
    assert (ours - theirs).abs().max() < 1e-4
    assert theirs.abs().mean() > 0.1
    ours = run_chunks(config.stream, layers, latents, embedding, step=2, num_passes_before=2)
    theirs = block_causal(original_dit(split(layers)[0]), 12, latents, 0.0, embedding, 3)
    assert (ours - theirs).abs().max() < 1e-4


@torch.no_grad()
def test_a_long_stream_does_not_feel_its_position():
    """Rotary positions are relative: 1,500 latent frames on, the same content gives the same flow."""
    config = tiny_config(context={"num_window_latent_frames": 3, "num_sink_latent_frames": 0}).stream
    layers = build_all_layers(config, CPU)
    rows = RowContextFactory(config, CPU)
    texts = text_of(layers, embed(tiny_config(), "two red boats"))
    contents = [torch.randn(latent_shape(config)) for _ in range(3)]
    flows = []
    # Multiples of the window, so that slots coincide too.
    for start in (0, 1500, 3_000_000):
        caches = rows.new_caches([block.index for block in layers.blocks])
        for chunk in range(3):
            # A stream that is past its start has a full window: fill it before looking.
            row = rows.make(Row(0, max(start, 3) + chunk, 0, 0), caches, texts)
            flow = layers.forward(RowBatch([row], contents[chunk][None]), exact_rows=True).flow_RCNhw
        flows.append(flow)
    assert (flows[0] - flows[1]).abs().max() < 1e-4
    assert (flows[0] - flows[2]).abs().max() < 1e-4
