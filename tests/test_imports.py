"""Parts import from their left only: config, model, schedule, engine, controller, media, then what joins them."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ds_stream"
ORDER = [
    "core",
    "partition",
    "settings",
    "config",
    "model",
    "schedule",
    "engine",
    "controller",
    "media",
    "reference",
    "memory",
    "figures",
    "run",
    "report",
    "cli",
    "device",
    "summary",
    "app",
    "bench",
]
SOURCES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_come_from_the_left(path: Path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own == "__init__":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            part = part_of(module) if module.startswith("ds_stream") else ""
            if part and part != own:
                assert ORDER.index(part) < ORDER.index(own), f"{own} imports {module}"


def test_core_and_config_do_not_pull_in_torch():
    for path in (PACKAGE / "core.py", PACKAGE / "settings.py", PACKAGE / "config.py"):
        names = {n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        assert not any(name.startswith(("torch", "deepspeed", "diffusers")) for name in names)
