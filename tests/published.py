"""Writes tiny models in the formats that people have, by the tables of names of the original code."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ds_stream.config import Config
from ds_stream.model.pipeline import StageLayers, build_all_layers
from rings import CPU, tiny_config

State = dict[str, Tensor]

DIT_NAMES = {
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn1.norm_q": "self_attn.norm_q",
    "attn1.norm_k": "self_attn.norm_k",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o",
    "attn2.norm_q": "cross_attn.norm_q",
    "attn2.norm_k": "cross_attn.norm_k",
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "proj_out": "head.head",
    "patch_embedding": "patch_embedding",
}
RESIDUAL = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}


def config_with(**model: object) -> Config:
    """A model whose VAE is as deep as the published one, since names depend on that."""
    return tiny_config(model={"num_layers": 2, **model}, vae={"base_dim": 4, "num_res_blocks": 2})


def states_of(config: Config) -> tuple[State, State]:
    """DiT and VAE of random weights by diffusers' names."""
    return split(build_all_layers(config.stream, CPU))


def split(layers: StageLayers) -> tuple[State, State]:
    *_, head = layers.ring.values()
    dit: State = {**layers.embed.state_dict(), **head.state_dict()}
    for block in layers.blocks:
        dit |= {f"blocks.{block.index}.{name}": value for name, value in block.block.state_dict().items()}
    vae = [layer.state_dict() for layer in (layers.encode, *layers.decode.values())]
    return dit, {name: value for state in vae for name, value in state.items()}


def original_dit(state: State) -> State:
    return {original_dit_name(name): value for name, value in state.items()}


def original_dit_name(name: str) -> str:
    if name == "scale_shift_table":
        return "head.modulation"
    block = re.match(r"blocks\.\d+\.", name)
    prefix, rest = (block[0], name[block.end() :]) if block else ("", name)
    if rest == "scale_shift_table":
        return prefix + "modulation"
    module, _, kind = rest.rpartition(".")
    return f"{prefix}{DIT_NAMES[module]}.{kind}"


def original_vae(state: State) -> State:
    return {original_vae_name(name): value for name, value in state.items()}


def original_vae_name(name: str) -> str:
    """The Wan decoder counts residual blocks and upsamplers through; the encoder's list is flat already."""
    for old, new in (("quant_conv.", "conv1."), ("post_quant_conv.", "conv2.")):
        if name.startswith(old):
            return name.replace(old, new)
    half, rest = name.split(".", 1)
    rest = rest.replace("conv_in.", "conv1.").replace("norm_out.", "head.0.").replace("conv_out.", "head.2.")
    rest = rest.replace("mid_block.attentions.0.", "middle.1.")
    rest = re.sub(r"mid_block\.resnets\.([01])\.", lambda m: f"middle.{2 * int(m[1])}.", rest)
    rest = re.sub(r"down_blocks\.(\d+)\.", r"downsamples.\1.", rest)
    rest = re.sub(r"up_blocks\.(\d)\.resnets\.(\d)\.", lambda m: f"upsamples.{4 * int(m[1]) + int(m[2])}.", rest)
    rest = re.sub(r"up_blocks\.(\d)\.upsamplers\.0\.", lambda m: f"upsamples.{4 * int(m[1]) + 3}.", rest)
    for old, new in RESIDUAL.items():
        rest = re.sub(rf"(middle|downsamples|upsamples)(\.\d+)\.{old}\.", rf"\1\2.{new}.", rest)
    return f"{half}.{rest.replace('conv_shortcut.', 'shortcut.')}"


def write_shards(folder: Path, state: State, stem: str = "diffusion_pytorch_model", num_shards: int = 3) -> None:
    """Into an existing folder."""
    names = sorted(state)
    files = [f"{stem}-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    for index, file in enumerate(files):
        save_file({name: state[name].contiguous() for name in names[index::num_shards]}, folder / file)
    weight_map = {name: files[place % num_shards] for place, name in enumerate(names)}
    index_file = folder / f"{stem}.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_diffusers(folder: Path, dit: State, vae: State) -> Path:
    for part in ("transformer", "vae"):
        (folder / part).mkdir(parents=True)
    write_shards(folder / "transformer", dit)
    save_file(
        {name: value.contiguous() for name, value in vae.items()}, folder / "vae/diffusion_pytorch_model.safetensors"
    )
    return folder


def write_original(folder: Path, dit: State, vae: State) -> Path:
    folder.mkdir()
    save_file(original_dit(dit), folder / "diffusion_pytorch_model.safetensors")
    torch.save(original_vae(vae), folder / "Wan2.1_VAE.pth")
    return folder
