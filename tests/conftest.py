"""Fixtures that several files of tests share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from rolecall.runtime.objects import FolderObjects, Objects
from rolecall.runtime.store import PolicyStore

from .s3 import S3Server
from .stores import opened


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
def store(objects: Objects, tmp_path: Path) -> PolicyStore:
    return opened(objects, tmp_path)
