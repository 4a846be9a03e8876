"""What the weights' way costs: publish, fetch and poll, each beside bare boto3 against the same S3 server.

    python -m tests.bench.weights --json [--rounds 5]      (from the repository root)

publish_x:   `publish` of a 64 MB adapter, to the moment its version is visible, over a bare boto3 multipart
             PUT of the same bytes.
fetch_x:     `fetch`, verified and on the disk, over a bare parallel GET of the same object to a file.
poll_bytes:  bytes on the wire, both ways and headers included, of asking for a new version when there is none.
poll_is_304: whether the server's answer to it is a 304.
applied_p95_s: seconds from a version's being visible to the first token that a worker samples under it, eight
             workers at once.
pause_ms:    how much longer a worker's tokens wait for each other at a swap than elsewhere: see `swaps`.

Both ratios are medians over the rounds of one round's ratio, so that what else the machine does weighs on both
sides. Sides take turns to go first, and each finds 64 MB of memory that was just in use: on a virtual machine
fresh memory costs as much as the transfer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from rolecall.runtime.cache import Cache
from rolecall.runtime.store import PolicyStore

from ..faults import FaultProxy
from ..s3 import S3Server
from . import swaps

SIZE = 64 << 20  # bytes


def seconds(work: Callable[[], object], scratch: Path) -> float:
    file = scratch / "warm"
    file.write_bytes(bytes(SIZE))
    file.unlink()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Sides:
    """Ours and bare boto3, in one bucket, with another 64 MB each round."""

    def __init__(self, bucket: str, scratch: Path) -> None:
        from boto3.session import Session
        from botocore.config import Config
        from rolecall.runtime.s3 import S3Objects

        config = Config(s3={"addressing_style": "path"})  # type: ignore[typeddict-item]
        self.bucket, self.scratch = bucket, scratch
        self.client = Session().client("s3", config=config)
        self.objects = S3Objects(bucket, "bench/")
        self.writer = self.store("writer")
        self.epoch = self.writer.take_epoch()

    def store(self, name: str) -> PolicyStore:
        return PolicyStore(self.objects, cache=Cache(self.scratch / name), run="bench")

    def publish(self, version: int, data: bytes) -> None:
        files = {"adapter_model.safetensors": data, "adapter_config.json": b'{"r": 8}'}
        self.writer.publish(files, version=version, step=version, epoch=self.epoch)

    def bare_put(self, data: bytes) -> None:
        self.client.upload_fileobj(BytesIO(data), self.bucket, "bare")

    def bare_get(self, version: int) -> None:
        key = f"bench/policy/v{version:06d}/adapter_model.safetensors"
        self.client.download_file(self.bucket, key, str(self.scratch / "bare"))

    def round(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of each side to put and to get."""
        data, reader = os.urandom(SIZE), self.store("reader")
        puts = {"ours": lambda: self.publish(number, data), "bare": lambda: self.bare_put(data)}
        gets = {"ours": lambda: reader.fetch(number), "bare": lambda: self.bare_get(number)}
        found = []
        for sides in (puts, gets):
            turns = sorted(sides, reverse=number % 2 == 0)
            found.append({side: seconds(sides[side], self.scratch) for side in turns})
        for folder in (self.scratch / "reader").glob("v*"):
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
        (self.scratch / "bare").unlink()
        self.writer.collect(keep=1)
        return found[0], found[1]


def poll(server: S3Server, scratch: Path) -> dict[str, Any]:
    """One poll of a store where nothing is new, as the wire sees it."""
    from rolecall.runtime.s3 import S3Objects

    with FaultProxy(server) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        store = PolicyStore(S3Objects(server.bucket, "bench/"), cache=Cache(scratch / "poll"), run="bench")
        store.head()
        store.head()
    last = proxy.requests[-1]
    return {"poll_bytes": last.sent + last.received, "poll_is_304": last.status == 304}


def measure(rounds: int, versions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as folder:
        scratch = Path(folder)
        (scratch / "s3").mkdir()
        server = S3Server(scratch / "s3")
        server.start()
        try:
            os.environ.update(server.environment())
            sides = Sides(server.bucket, scratch)
            times = [sides.round(number) for number in range(rounds + 1)][1:]  # the first is a warm-up
            polled = poll(server, scratch)
            os.environ.update(server.environment())  # `poll` went by way of its own door
            swapped = swaps.measure(f"s3://{server.bucket}/swaps", versions)
        finally:
            server.stop()
    result: dict[str, Any] = {}
    for place, name in enumerate(("publish", "fetch")):
        pairs = [time[place] for time in times]
        result[f"{name}_x"] = round(statistics.median(pair["ours"] / pair["bare"] for pair in pairs), 2)
        result[f"{name}_s"] = round(statistics.median(pair["ours"] for pair in pairs), 3)
        result[f"bare_{name}_s"] = round(statistics.median(pair["bare"] for pair in pairs), 3)
    return {**result, **polled, **swapped, "bytes": SIZE, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--versions", type=int, default=12, help="how many versions the workers follow")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    settings = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker has seven others beside it
    result = measure(settings.rounds, settings.versions)
    if settings.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:15}{value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
