"""Fixtures that several files of tests share."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rolecall.runtime.objects import FolderObjects, Objects
from rolecall.runtime.store import PolicyStore

from .s3 import S3Server
from .stores import opened

# Tests and the processes they start share the cores: where each computes on all of them, they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read at the first import of torch
MEMORY = Path("/dev/shm")  # what a kill leaves half written is the same there, and nothing waits for a disk
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4e9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    tempfile.tempdir = str(MEMORY)  # Hypothesis draws many examples in one test: each has a folder of its own


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shared out to several processes, slow tests come first, so that none of them is left with the last one.

    So does the file that takes longest of all without them.
    """
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: (item.get_closest_marker("slow") is None, item.path.name != "test_recipes.py")
        )


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with one bucket: let each test have a run or a prefix of its own."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def objects(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """An empty place for objects: once a folder, once a real S3 server."""
    if request.param == "folder":
        return FolderObjects(tmp_path / "objects")
    from rolecall.runtime.s3 import S3Objects

    server: S3Server = request.getfixturevalue("s3_server")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return S3Objects(server.bucket, f"{secrets.token_hex(8)}/")


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Objects]:
    """Objects below a prefix of this test's own, by way of an endpoint and with other settings if asked."""
    from rolecall.runtime.s3 import S3Objects

    prefix = f"{secrets.token_hex(8)}/"

    def through(
        endpoint: str = s3_server.endpoint,
        *,
        patience_s: float = 60.0,
        read_timeout_s: float = 30.0,
        **settings: str,
    ) -> Objects:
        for name, value in (s3_server.environment() | {"AWS_ENDPOINT_URL": endpoint} | settings).items():
            monkeypatch.setenv(name, value)
        name = settings.get("bucket", s3_server.bucket)
        return S3Objects(name, prefix, patience_s=patience_s, read_timeout_s=read_timeout_s)

    return through


@pytest.fixture
def store(objects: Objects, tmp_path: Path) -> PolicyStore:
    return opened(objects, tmp_path)
