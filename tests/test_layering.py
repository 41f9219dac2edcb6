"""A module imports only from its own layer or from lower ones (design, section 1)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = {
    "pallas_kernels": 0,
    "jaxspec.config": 0,
    "jaxspec.devices": 0,
    "jaxspec.families": 0,
    "jaxspec.sampling": 1,
    "jaxspec.cache": 1,
    "jaxspec.models": 2,
    "jaxspec.checkpoint": 3,
    "jaxspec.drafters": 3,
    "jaxspec.decoding": 4,
    "jaxspec.engine": 5,
    "jaxspec.cli": 6,
    "jaxspec": 7,
}
FILES = sorted(p for package in ("jaxspec", "pallas_kernels") for p in (ROOT / package).rglob("*.py"))


def layer_of(module: str) -> int:
    parts = module.split(".")
    return next(LAYERS[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in LAYERS)


def imported_modules(source: str) -> list[str]:
    nodes = ast.walk(ast.parse(source))
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            names.append(node.module)
    return [name for name in names if name.split(".")[0] in ("jaxspec", "pallas_kernels")]


def breaches(module: str, source: str) -> list[str]:
    return [name for name in imported_modules(source) if layer_of(name) > layer_of(module)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    assert breaches(module, path.read_text()) == []


def test_kernels_never_import_jaxspec():
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        assert not [m for m in imported_modules(path.read_text()) if m.startswith("jaxspec")]


def test_a_breach_is_seen():
    assert breaches("jaxspec.cache.page_table", "from jaxspec.engine.llm import LLM") == ["jaxspec.engine.llm"]
    assert breaches("jaxspec.config", "def f():\n    import jaxspec.models.params") == ["jaxspec.models.params"]
