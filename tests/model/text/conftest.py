"""A tiny UMT5 on disk."""

import shutil
from pathlib import Path

import pytest
from transformers import UMT5EncoderModel

from tiny_umt5 import make_umt5, write_umt5


@pytest.fixture(scope="module")
def model() -> UMT5EncoderModel:
    return make_umt5()


@pytest.fixture(scope="module")
def written(model: UMT5EncoderModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_umt5(tmp_path_factory.mktemp("umt5"), model)


@pytest.fixture
def diffusers(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "diffusers", tmp_path / "diffusers"))


@pytest.fixture
def original(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "original", tmp_path / "original"))
