"""What the machines of a launch are told of their workers: the flags of `rolecall join`, by the same names."""

from __future__ import annotations

import argparse

__all__ = ["add_engine_flags", "join_flags"]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", help="what workers sample with there, instead of the run's own setting")
    parser.add_argument("--engine-python", metavar="PATH", help="the interpreter they run in there")


def join_flags(options: argparse.Namespace, *, gpus: str = "", workers: int | None = None) -> list[str]:
    """To follow `rolecall join URL --token-file FILE`. gpus, workers: as that command takes them."""
    flags = {
        "--workers": workers, "--gpus": gpus, "--engine": options.engine, "--engine-python": options.engine_python,
    }  # fmt: skip
    return [word for flag, value in flags.items() if value for word in (flag, str(value))]
