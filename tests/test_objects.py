"""One contract for objects in a folder and in an S3 bucket, and what each has to withstand."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rolecall.runtime.errors import Unrecoverable
from rolecall.runtime.objects import Conflict, FolderObjects, Missing, Objects, StoreError, prove, read

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
    data = os.urandom(9 << 20)
    objects.put("large", data, if_absent=True)
    assert read(objects, "large")[0] == data


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


# S3, and what a network does to it.


class FaultyProxy:
    """A TCP proxy on loopback to `port` whose first connections go wrong, each as its fault has it."""

    def __init__(
        self, port: int, *faults: Callable[[FaultyProxy, socket.socket, socket.socket], None]
    ) -> None:
        self.port, self.faults = port, list(faults)
        self.connections = 0
        self.answers: list[bytes] = []  # that never reached the client
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.port))
            fault = self.faults[self.connections] if self.connections < len(self.faults) else FaultyProxy.none
            self.connections += 1
            threading.Thread(target=fault, args=(self, client, server), daemon=True).start()

    def none(self, client: socket.socket, server: socket.socket) -> None:
        threading.Thread(target=pump, args=(client, server), daemon=True).start()
        pump(server, client)

    def lose_answer(self, client: socket.socket, server: socket.socket) -> None:
        """The request arrives and is carried out; the client learns nothing of it."""
        threading.Thread(target=pump, args=(client, server), daemon=True).start()
        while (answer := server.recv(65536)).startswith(b"HTTP/1.1 100"):
            client.sendall(answer)
        self.answers.append(answer)
        client.shutdown(socket.SHUT_RDWR)
        client.close()

    def cut_after_headers(self, client: socket.socket, server: socket.socket) -> None:
        self._cut(client, server, body_bytes=0)

    def cut_in_the_body(self, client: socket.socket, server: socket.socket) -> None:
        self._cut(client, server, body_bytes=1000)

    def _cut(self, client: socket.socket, server: socket.socket, *, body_bytes: int) -> None:
        threading.Thread(target=pump, args=(server, client), daemon=True).start()
        data = b""
        while b"\r\n\r\n" not in data or len(data.split(b"\r\n\r\n", 1)[1]) < body_bytes:
            more = client.recv(65536)
            headers, end, body = (data + more).partition(b"\r\n\r\n")
            allowed = headers + end + body[:body_bytes]
            server.sendall(allowed[len(data) :])
            data = allowed
        for end in (server, client):
            end.shutdown(socket.SHUT_RDWR)
            end.close()

    def slow_down(self, client: socket.socket, server: socket.socket) -> None:
        client.recv(65536)
        client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        client.close()
        server.close()


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # either end has gone, as the fault would have it
        return


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Objects]:
    """Objects below a prefix of this test's own, by way of an endpoint and with other settings if asked."""
    from rolecall.runtime.s3 import S3Objects

    prefix = f"{secrets.token_hex(8)}/"

    def through(endpoint: str = s3_server.endpoint, *, patience_s: float = 60.0, **settings: str) -> Objects:
        for name, value in (s3_server.environment() | {"AWS_ENDPOINT_URL": endpoint} | settings).items():
            monkeypatch.setenv(name, value)
        return S3Objects(settings.get("bucket", s3_server.bucket), prefix, patience_s=patience_s)

    return through


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_answer_is_not_a_lost_race(s3_server: S3Server, bucket: Callable[..., Objects], lost: int):
    with FaultyProxy(s3_server.ports[0], *[FaultyProxy.lose_answer] * lost) as proxy:
        etag = bucket(proxy.url).put("v1", b"mine, by its nonce", if_absent=True)
    assert b" 200 " in proxy.answers[0].splitlines()[0]  # it was carried out
    assert proxy.connections > lost
    assert bucket().get("v1") == (b"mine, by its nonce", etag)


@pytest.mark.slow
def test_a_lost_answer_does_not_hide_a_lost_race(s3_server: S3Server, bucket: Callable[..., Objects]):
    bucket().put("v1", b"theirs")
    with FaultyProxy(s3_server.ports[0], FaultyProxy.lose_answer) as proxy, pytest.raises(Conflict):
        bucket(proxy.url).put("v1", b"mine", if_absent=True)
    assert read(bucket(), "v1")[0] == b"theirs"


@pytest.mark.slow
@pytest.mark.parametrize("checksums", ["when_supported", "when_required"])
@pytest.mark.parametrize("fault", [FaultyProxy.cut_after_headers, FaultyProxy.cut_in_the_body])
def test_a_cut_upload_leaves_the_old_object(
    s3_server: S3Server, bucket: Callable[..., Objects], fault: Callable[..., None], checksums: str
):
    bucket().put("k", b"old")
    settings = {"AWS_REQUEST_CHECKSUM_CALCULATION": checksums}
    with FaultyProxy(s3_server.ports[0], *[fault] * 9) as proxy:
        with pytest.raises(StoreError, match=r"k in bucket .*check that the server runs"):
            bucket(proxy.url, patience_s=0, **settings).put("k", os.urandom(1 << 20))
        assert proxy.connections == 2
    assert read(bucket(), "k")[0] == b"old"


@pytest.mark.slow
def test_a_server_that_slows_us_down_is_waited_for(s3_server: S3Server, bucket: Callable[..., Objects]):
    with FaultyProxy(
        s3_server.ports[0], *[FaultyProxy.slow_down] * 6
    ) as proxy:  # boto alone tries five times
        bucket(proxy.url).put("k", b"at last")
    assert read(bucket(), "k")[0] == b"at last"


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
