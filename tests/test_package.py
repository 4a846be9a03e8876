"""What is installed: the wheel holds the package and nothing else, and its metadata is sound."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


@pytest.mark.slow
def test_the_wheel_of_a_clean_checkout_holds_every_module_and_the_base_model_and_no_more(tmp_path: Path):
    checkout = tmp_path / "checkout"
    for name in _tracked():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "dist"), str(checkout)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = ("runtime/", "actors/", "recipes/")
    expected = {
        f"rolecall/{name}"
        for name in _tracked()
        if name in ("__init__.py", "py.typed") or (name.startswith(package) and not name.endswith(".md"))
    }
    assert held == expected
    assert "rolecall/actors/tiny/base/model.safetensors" in held


def test_every_package_folder_is_listed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    folders = {
        "rolecall" if str(Path(name).parent) == "." else f"rolecall.{Path(name).parent}".replace("/", ".")
        for name in _tracked()
        if Path(name).name == "__init__.py" and not name.startswith("tests/")
    }
    assert listed == folders


def test_the_command_and_the_extras_are_there():
    (script,) = entry_points(group="console_scripts", name="rolecall")
    assert script.value == "rolecall.runtime.cli:main"
    extras = {
        line.split("extra == ")[1].strip("\"'") for line in requires("rolecall") or [] if "extra ==" in line
    }
    assert extras == {"vllm", "hub", "qlora", "envs", "test"}
