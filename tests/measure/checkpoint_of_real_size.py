"""Writes random weights of a preset's real size in Wan's original layout, for measurements.

    python tests/measure/checkpoint_of_real_size.py PRESET FOLDER

The published files are fp32, and so are these: 5.7 GB for 1.3B. An embedding of a prompt, ``prompt.safetensors``, and
a light VAE, ``taew2_1.safetensors``, lie beside them.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ds_stream.config import find_config, load_config  # noqa: E402
from ds_stream.model.pipeline import part_shapes  # noqa: E402
from ds_stream.model.weights.checkpoint import Part  # noqa: E402
from ds_stream.model.weights.load import Shapes  # noqa: E402
from published import original_dit, original_vae  # noqa: E402


def random_state(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Weights that keep a signal's size: ``1 / sqrt(fan_in)``, biases zero, gains one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        if len(shape) < 2 or name.endswith("gamma"):
            state[name] = torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
            continue
        fan_in = shape[-1] if name.endswith("scale_shift_table") else torch.Size(shape[1:]).numel()
        state[name] = (torch.randn(shape, device=device) * fan_in**-0.5).cpu()
    return state


def main(preset: str, folder: Path) -> None:
    config = load_config(find_config(preset)).stream
    shapes = {part: part_shapes(config, part) for part in (Part.DIT, Part.VAE, Part.LIGHT_VAE)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(original_dit(random_state(shapes[Part.DIT])), folder / "diffusion_pytorch_model.safetensors")
    torch.save(original_vae(random_state(shapes[Part.VAE])), folder / "Wan2.1_VAE.pth")
    save_file(random_state(shapes[Part.LIGHT_VAE]), folder / "taew2_1.safetensors")
    model = config.model
    save_file({"prompt_embeds": torch.randn(20, model.text_dim)}, folder / "prompt.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
