"""One contract for objects in a folder and in an S3 bucket, and what each has to withstand."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rolecall.runtime.errors import Unrecoverable
from rolecall.runtime.objects import Conflict, FolderObjects, Missing, Objects, prove, read

from .s3 import S3Server

# The contract.


def test_an_object_is_what_was_put_last(objects: Objects):
    with pytest.raises(Missing, match=r"a/b"):
        objects.get("a/b")
    first = objects.put("a/b", b"1")
    assert objects.get("a/b") == (b"1", first)
    second = objects.put("a/b", b"2")
    assert second != first
    assert objects.get("a/b") == (b"2", second)


def test_a_conditional_get_answers_only_to_news(objects: Objects):
    first = objects.put("HEAD", b"1")
    assert objects.get("HEAD", unless=first) is None
    second = objects.put("HEAD", b"2")
    assert objects.get("HEAD", unless=first) == (b"2", second)


def test_only_the_first_creates(objects: Objects):
    etag = objects.put("k", b"first", if_absent=True)
    for data in (b"second", b"first"):
        with pytest.raises(Conflict, match="k in"):
            objects.put("k", data, if_absent=True)
    assert objects.get("k") == (b"first", etag)


def test_compare_and_swap(objects: Objects):
    with pytest.raises(Conflict):
        objects.put("k", b"0", if_match='"' + "0" * 32 + '"')
    old = objects.put("k", b"1")
    new = objects.put("k", b"2", if_match=old)
    with pytest.raises(Conflict):
        objects.put("k", b"3", if_match=old)
    assert objects.get("k") == (b"2", new)


def test_list_and_delete(objects: Objects):
    assert objects.list("") == []
    for key in ("p/v2/b", "p/v10/a", "p/v1", "q/x", "HEAD"):
        objects.put(key, b"")
    assert objects.list("p/v") == ["p/v1", "p/v10/a", "p/v2/b"]
    assert objects.list("p/v1") == ["p/v1", "p/v10/a"]
    objects.delete("p/v10/a")
    objects.delete("p/v10/a")
    assert objects.list("") == ["HEAD", "p/v1", "p/v2/b", "q/x"]
    objects.put("p/v10/a", b"again", if_absent=True)
    assert read(objects, "p/v10/a")[0] == b"again"


def test_large_objects_come_back_whole(objects: Objects):
    data = os.urandom(33 << 20)  # in S3, two parts and a bit
    objects.put("large", data, if_absent=True)
    assert read(objects, "large")[0] == data
    assert b"".join(objects.stream("large", len(data))) == data


@pytest.mark.parametrize("size", [0, 1, 16 << 20, (16 << 20) + 1])
def test_a_stream_is_the_object_whatever_size_was_expected(objects: Objects, size: int):
    data = os.urandom(size)
    objects.put("k", data)
    for expected in {size, 2 * size + (17 << 20)}:
        assert b"".join(objects.stream("k", expected)) == data
    if size > 1:
        assert (
            hashlib.sha256(b"".join(objects.stream("k", size - 1))).digest() == hashlib.sha256(data).digest()
        )
    objects.delete("k")
    with pytest.raises(Missing, match="k in"):
        list(objects.stream("k", size))


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "..", "a/../b", ".", ".lock", "a b", "a\0", "ü", "a\\b", "a\n"]
)
def test_bad_keys_are_refused(objects: Objects, key: str):
    for use in (objects.get, objects.delete, lambda key: objects.put(key, b"")):
        with pytest.raises(ValueError, match="bad object key"):
            use(key)
    assert objects.list("") == []


def test_the_probe_leaves_nothing(objects: Objects):
    objects.probe()
    assert objects.list("") == []


# Folders.


class Unconditional(FolderObjects):
    """A store that ignores conditions, as some S3 servers do."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        return super().put(key, data)


def test_a_store_that_ignores_conditions_fails_the_probe(tmp_path: Path):
    with pytest.raises(Unrecoverable, match="ignores conditional writes") as caught:
        prove(Unconditional(tmp_path))
    assert caught.value.exit_code == 2


def test_a_folder_that_cannot_be_written_fails_the_probe(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Unrecoverable, match=r"file/store: .*check its permissions") as caught:
        FolderObjects(tmp_path / "file" / "store").probe()
    assert caught.value.exit_code == 2


def test_what_a_killed_writer_left_is_never_written_into(tmp_path: Path):
    objects = FolderObjects(tmp_path)
    objects.put("v1", b"published")
    (tmp_path / ".upload").hardlink_to(tmp_path / "v1")  # killed after the link, before the clean-up
    objects.put("v2", b"other")
    assert read(objects, "v1")[0] == b"published"
    assert objects.list("") == ["v1", "v2"]


def count_up(objects: Objects, times: int) -> None:
    """Add to a counter by compare-and-swap, `times` times."""
    while times:
        data, etag = read(objects, "counter")
        try:
            objects.put("counter", str(int(data) + 1).encode(), if_match=etag)
        except Conflict:
            continue
        times -= 1


def test_contended_swaps_from_threads_lose_nothing(tmp_path: Path):
    objects = FolderObjects(tmp_path)
    objects.put("counter", b"0")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: count_up(FolderObjects(tmp_path), 10), range(4)))
    assert read(objects, "counter")[0] == b"40"


@pytest.mark.slow
def test_contended_swaps_from_processes_lose_nothing(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path\n"
        "from rolecall.runtime.objects import Conflict, FolderObjects, read\n"
        "objects, left = FolderObjects(Path(sys.argv[1])), 100\n"
        "while left:\n"
        "    data, etag = read(objects, 'counter')\n"
        "    try: objects.put('counter', str(int(data) + 1).encode(), if_match=etag)\n"
        "    except Conflict: continue\n"
        "    left -= 1\n"
    )
    FolderObjects(tmp_path).put("counter", b"0")
    writers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert read(FolderObjects(tmp_path), "counter")[0] == b"400"


# S3: what a run is told before it begins. (test_faults.py: what a network does to it.)


@pytest.mark.slow
def test_mistakes_end_in_one_clear_sentence(s3_server: S3Server, bucket: Callable[..., Objects]):
    closed = socket.create_server(("127.0.0.1", 0))
    nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    closed.close()
    at = s3_server.endpoint
    cases: list[tuple[str, dict[str, str], str]] = [
        (at, {"bucket": "no-such-bucket"}, f"there is no bucket 'no-such-bucket' at {at}: create it"),
        (at, {"AWS_ACCESS_KEY_ID": "AKWRONG"}, f"'rolecall' at {at} refused these credentials"),
        (at, {"AWS_SECRET_ACCESS_KEY": "wrong"}, f"'rolecall' at {at} refused these credentials"),
        (nowhere, {}, f"'rolecall' at {nowhere}: Could not connect"),
        ("127.0.0.1:8333", {}, "no client for bucket 'rolecall': Invalid endpoint: 127.0.0.1:8333; correct"),
    ]
    for endpoint, settings, sentence in cases:
        began = time.monotonic()
        with pytest.raises(Unrecoverable) as caught:
            bucket(endpoint, **settings).probe()
        assert time.monotonic() - began < 10
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 2


@pytest.mark.slow
def test_no_credentials_end_in_one_clear_sentence(
    bucket: Callable[..., Objects], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    bucket()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    from rolecall.runtime.s3 import S3Objects

    with pytest.raises(Unrecoverable, match=r"no credentials for bucket 'b' .*AWS_ACCESS_KEY_ID") as caught:
        S3Objects("b").probe()
    assert caught.value.exit_code == 2


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up_in_ten_seconds(bucket: Callable[..., Objects]):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(Unrecoverable, match="Read timeout"):
            bucket(f"http://127.0.0.1:{silent.getsockname()[1]}").probe()
        assert time.monotonic() - began < 10.5
