"""A task and a base model that learn on a laptop's CPU in a minute: `problems`, `base/`, `make_base`."""

from pathlib import Path

__all__ = ["BASE"]

BASE = Path(__file__).parent / "base"
"""The model's folder: a warm-started Llama of 0.55 M parameters in float32, with its tokenizer."""
