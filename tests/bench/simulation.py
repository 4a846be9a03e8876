"""How fast a run is simulated: async_grpo by the profile that comes with the package, with more and more workers.

    python -m tests.bench.simulation --json [--workers 10 100 1000]

Prints for each number of workers the virtual seconds, the CPU seconds that they took, and the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import msgspec
from rolecall.actors.plan import PUBLISHED
from rolecall.actors.profile import Profile
from rolecall.actors.simulation import simulate
from rolecall.recipes import async_grpo


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="JSON without line breaks")
    options = parser.parse_args()
    profile = msgspec.json.decode((PUBLISHED / "grpo_8b.json").read_bytes(), type=Profile)
    found = [_simulated(profile, workers, options.steps) for workers in options.workers]
    print(json.dumps(found, indent=None if options.json else 1))


def _simulated(profile: Profile, workers: int, steps: int) -> dict[str, Any]:
    """As many groups a step as workers, so that all have work."""
    config = async_grpo.Config(steps=steps, rollout_workers=workers, batch=workers, max_tokens=1024)
    began = time.process_time()
    prediction = simulate(async_grpo.build(config), profile)
    cpu_s = time.process_time() - began
    return {
        "workers": workers,
        "groups": prediction.groups_trained,
        "virtual_s": round(prediction.wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "x": round(prediction.wall_s / cpu_s, 1),
    }


if __name__ == "__main__":
    main()
