"""Where each part's weights lie, given what the config says and what a published folder looks like."""

from pathlib import Path

from ds_stream.model.weights.checkpoint import Part
from ds_stream.settings import HASHED, RANDOM, StreamConfig

_VAE_NAMES = ("vae", "Wan2.1_VAE.pth")
ORIGINAL_UMT5 = "models_t5_umt5-xxl-enc-bf16.pth"
TEXT_NAMES = ("text_encoder", ORIGINAL_UMT5)


def locate_weights(config: StreamConfig) -> dict[Part, Path | None]:
    """File or folder of each part that the model has; ``None`` for random weights.

    Raises:
        ValueError: a part is not where it is said or expected to be.
    """
    light = config.light_vae
    places = {Part.DIT: _locate_dit(config)}
    if light.use != "both":
        places[Part.VAE] = _locate_vae(config)
    if light.use != "no":
        path = None if light.weights == RANDOM else _existing("light_vae.weights", light.weights)
        places[Part.LIGHT_VAE] = path
    return places


def locate_text_encoder(config: StreamConfig) -> Path | None:
    """Folder that holds UMT5, or ``None`` for the hashed encoder.

    Raises:
        ValueError: it is not where it is said or expected to be.
    """
    encoder = config.text.encoder
    if encoder == HASHED or (encoder == "auto" and config.model.weights == RANDOM):
        return None
    if encoder != "auto":
        return _existing("text.encoder", encoder, HASHED)
    places = (config.model.weights, config.vae.weights)
    roots = [_root(Path(place).expanduser()) for place in places if place not in ("auto", RANDOM)]
    for root in roots:
        if any((root / name).exists() for name in TEXT_NAMES):
            return root
    raise ValueError(
        f"stream.text.encoder is auto, but {' and '.join(map(str, roots))} hold neither {' nor '.join(TEXT_NAMES)}; "
        "name the folder of Wan2.1-T2V (--set stream.text.encoder=FOLDER), or give --prompt-embeds"
    )


def _locate_dit(config: StreamConfig) -> Path | None:
    if config.model.weights == RANDOM:
        return None
    path = _existing("model.weights", config.model.weights)
    return path / "transformer" if (path / "transformer").is_dir() else path


def _locate_vae(config: StreamConfig) -> Path | None:
    weights = config.vae.weights
    if weights == RANDOM or (weights == "auto" and config.model.weights == RANDOM):
        return None
    if weights != "auto":
        path = _existing("vae.weights", weights)
        return next((path / name for name in _VAE_NAMES if (path / name).exists()), path)
    root = _root(_existing("model.weights", config.model.weights))
    for name in _VAE_NAMES:
        if (root / name).exists():
            return root / name
    raise ValueError(
        f"stream.vae.weights is auto, but {root} holds neither {' nor '.join(_VAE_NAMES)}; name the folder of "
        f'Wan2.1-T2V (--set stream.vae.weights=FOLDER), or "{RANDOM}"'
    )


def _existing(key: str, text: str, without: str = RANDOM) -> Path:
    path = Path(text).expanduser()
    if not path.exists():
        raise ValueError(
            f"stream.{key}: there is no {path}; give the path of the published file or folder (--set "
            f'stream.{key}=PATH), or "{without}" to try the pipeline without'
        )
    return path


def _root(path: Path) -> Path:
    """The folder that holds the parts of a model, given one of them or itself."""
    folder = path if path.is_dir() else path.parent
    return folder.parent if folder.name in ("transformer", "vae") else folder
