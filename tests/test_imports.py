"""Who may import whom: recipes → actors → runtime → third parties, and never back."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["runtime", "actors", "recipes"]  # each may import itself and those before it
HEAVY = {"torch", "transformers", "peft", "vllm", "boto3", "botocore", "matplotlib", "datasets"}
SERVER = {"starlette", "uvicorn", "httpx", "anyio"}  # only in the processes that need them


def sources() -> list[Path]:
    return [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(absolute module, line) of each import; of `from x import y`, both x and x.y."""
    package = ["rolecall", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_layers(path: Path):
    layer = path.relative_to(ROOT).parts[0]
    forbidden = [f"rolecall.{other}" for other in LAYERS[LAYERS.index(layer) + 1 :]]
    for module, line in imports(path):
        for other in forbidden:
            assert not f"{module}.".startswith(f"{other}."), (
                f"{path}:{line} imports {module}: {layer} comes before it"
            )


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_package_is_imported_by_its_one_name(path: Path):
    for module, line in imports(path):
        assert module.split(".")[0] not in LAYERS, (
            f"{path}:{line} imports {module}: a second copy of every class"
        )


def test_the_scanner_sees_all_kinds_of_imports(tmp_path: Path):
    found = {module for module, _ in imports(ROOT / "recipes" / "async_grpo.py")}
    assert "rolecall.actors.buffer.Buffer" in found
    assert "rolecall.runtime.Graph" in found


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that are loaded after it, in a new process."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return set(output.split())


def test_the_runtime_loads_nothing_heavy():
    loaded = loaded_by("import rolecall.runtime")
    assert loaded & (HEAVY | SERVER | {"numpy", "cloudpickle"}) == set()
    assert "rolecall" in loaded


def test_a_process_of_the_run_loads_no_library_for_learning_or_http():
    assert (
        loaded_by("import rolecall.runtime.process, rolecall.runtime.supervisor") & (HEAVY | SERVER) == set()
    )


def test_reading_a_recipe_loads_no_torch():
    statement = (
        "from rolecall.runtime.recipe import load_recipe\nm = load_recipe('async_grpo')\nm.build(m.Config())"
    )
    assert loaded_by(statement) & HEAVY == set()
