"""What a network and a server's crash do to the store in a bucket, and what must hold all the same."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rolecall.runtime.errors import Unrecoverable
from rolecall.runtime.objects import Conflict, Objects, StoreError, read
from rolecall.runtime.store import Fenced

from .faults import Fault, FaultProxy, Kind
from .s3 import S3Server
from .stores import adapter, contents, opened

pytestmark = pytest.mark.slow

Bucket = Callable[..., Objects]
LARGE = {"adapter_model.safetensors": os.urandom(33 << 20), "adapter_config.json": b'{"r": 8}'}


# One request.


@pytest.mark.parametrize(
    "kind", ["500", "503", "reset", "drop the answer", "cut after headers", "cut in the body"]
)
def test_a_put_goes_on_where_it_can(s3_server: S3Server, bucket: Bucket, kind: Kind):
    data = os.urandom(1 << 20)
    with FaultProxy(s3_server, Fault(kind, "PUT", "k", times=2)) as proxy:
        bucket(proxy.url).put("k", data)
        assert [seen.fault for seen in proxy.of("PUT")] == [kind, kind, None]
    assert read(bucket(), "k")[0] == data


@pytest.mark.parametrize(
    "kind", ["500", "503", "reset", "drop the answer", "cut the answer", "garble the answer"]
)
def test_a_get_goes_on_where_it_can(s3_server: S3Server, bucket: Bucket, kind: Kind):
    data = os.urandom(1 << 20)
    bucket().put("k", data)
    with FaultProxy(s3_server, Fault(kind, "GET", "k", times=2)) as proxy:
        assert read(bucket(proxy.url), "k")[0] == data
        assert [seen.fault for seen in proxy.of("GET")] == [kind, kind, None]


def test_an_answer_that_does_not_come_is_asked_for_again(s3_server: S3Server, bucket: Bucket):
    bucket().put("k", b"there")
    with FaultProxy(s3_server, Fault("hold", "GET", "k")) as proxy:
        assert read(bucket(proxy.url, read_timeout_s=0.5), "k")[0] == b"there"
        assert [seen.fault for seen in proxy.of("GET")] == ["hold", None]


def test_a_server_that_slows_us_down_is_waited_for(s3_server: S3Server, bucket: Bucket):
    with FaultProxy(s3_server, Fault("503", "PUT", "k", times=5)) as proxy:
        bucket(proxy.url).put("k", b"at last")
        assert len(proxy.of("PUT")) == 6
    assert read(bucket(), "k")[0] == b"at last"


@pytest.mark.parametrize(
    ("kind", "way_out"),
    [
        ("500", r"InternalError.* \(tries: 1\); check the server's state and its log"),
        ("503", r"SlowDown.* \(tries: 1\); check the server's state and its log"),
        (
            "reset",
            r"\(tries: 1\); check that the server runs and that AWS_ENDPOINT_URL and the network lead to it",
        ),
        ("hold", r"Read timeout.* \(tries: 1\); check that the server runs"),
    ],
)
def test_patience_ends_in_one_sentence_with_the_way_out(
    s3_server: S3Server, bucket: Bucket, kind: Kind, way_out: str
):
    with FaultProxy(s3_server, Fault(kind, "GET", "k", times=99)) as proxy:
        with pytest.raises(
            StoreError, match=rf"k in bucket 'rolecall' at {proxy.url}: .*{way_out}"
        ) as caught:
            bucket(proxy.url, patience_s=0, read_timeout_s=0.5).get("k")
        assert "\n" not in str(caught.value)
        assert len(proxy.requests) == 1


# A PUT that is cut after its headers must not leave an empty object.


@pytest.mark.parametrize("checksums", ["when_supported", "when_required"])
@pytest.mark.parametrize("kind", ["cut after headers", "cut in the body"])
def test_a_cut_upload_leaves_the_old_object(s3_server: S3Server, bucket: Bucket, kind: Kind, checksums: str):
    bucket().put("k", b"old")
    settings = {"AWS_REQUEST_CHECKSUM_CALCULATION": checksums}
    with FaultProxy(s3_server, Fault(kind, "PUT", "k", times=99)) as proxy:
        with pytest.raises(StoreError, match=r"k in bucket .*check that the server runs"):
            bucket(proxy.url, patience_s=0, **settings).put("k", os.urandom(1 << 20))
        [cut] = proxy.requests
    assert ("Content-MD5" in cut.headers) == (checksums == "when_required")
    assert ("x-amz-checksum-crc32" in cut.headers) == (checksums == "when_supported")
    assert read(bucket(), "k")[0] == b"old"


@pytest.mark.parametrize(
    ("endpoint", "addressing", "checksums"),
    [
        (None, "auto", "when_supported"),
        ("https://s3.eu-west-1.amazonaws.com/", "auto", "when_supported"),
        ("https://s3.hf.co/someone", "path", "when_required"),
        ("https://0123456789abcdef.r2.cloudflarestorage.com", "path", "when_required"),
        ("https://s3.us-west-004.backblazeb2.com", "path", "when_required"),
        ("http://127.0.0.1:8333", "path", "when_supported"),
        ("https://s3.nothf.co", "path", "when_supported"),
    ],
)
def test_each_kind_of_server_is_asked_its_own_way(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, addressing: str, checksums: str
):
    from rolecall.runtime.s3 import S3Objects

    for name in ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    if endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    config: Any = S3Objects("bucket")._client.meta.config
    assert config.s3["addressing_style"] == addressing
    assert config.request_checksum_calculation == config.response_checksum_validation == checksums


# The answer to a conditional PUT that was carried out is lost.


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_answer_is_not_a_lost_race(s3_server: S3Server, bucket: Bucket, lost: int):
    with FaultProxy(s3_server, Fault("drop the answer", "PUT", "v1", times=lost)) as proxy:
        etag = bucket(proxy.url).put("v1", b"mine, by its nonce", if_absent=True)
        assert [seen.status for seen in proxy.of("PUT")] == [200] + [412] * lost
    assert bucket().get("v1") == (b"mine, by its nonce", etag)


def test_a_lost_answer_does_not_hide_a_lost_race(s3_server: S3Server, bucket: Bucket):
    bucket().put("v1", b"theirs")
    with FaultProxy(s3_server, Fault("drop the answer", "PUT", "v1")) as proxy:
        with pytest.raises(Conflict):
            bucket(proxy.url).put("v1", b"mine", if_absent=True)
        assert [seen.status for seen in proxy.of("PUT")] == [412, 412]
    assert read(bucket(), "v1")[0] == b"theirs"


def test_a_trainer_that_was_overtaken_while_its_answer_was_lost_is_fenced(
    s3_server: S3Server, bucket: Bucket, tmp_path: Path
):
    new = opened(bucket(), tmp_path / "new")
    first = new.take_epoch()
    taken: list[int] = []

    def overtake(method: str, key: str) -> None:
        if (method, key) == ("put", "policy/HEAD") and not taken:
            taken.append(new.take_epoch())

    with FaultProxy(s3_server, Fault("drop the answer", "PUT", "policy/HEAD", times=2)) as proxy:
        old = opened(bucket(proxy.url), tmp_path / "old", overtake)
        with pytest.raises(
            Fenced, match=r"another trainer has started on run 'r' \(epoch 2\).*let one trainer"
        ):
            old.publish(adapter("old"), version=1, step=1, epoch=first)
    assert new.head() is None
    new.publish(adapter("new"), version=1, step=1, epoch=taken[0])
    assert contents(new.fetch(1)) == adapter("new")


# Gateways that leave conditions out.


def test_a_server_that_ignores_the_condition_of_a_get_is_followed_all_the_same(
    s3_server: S3Server, bucket: Bucket, tmp_path: Path
):
    writer = opened(bucket(), tmp_path)
    epoch = writer.take_epoch()
    published = writer.publish(adapter("v1"), version=1, step=1, epoch=epoch)
    with FaultProxy(s3_server, Fault("strip conditions", "GET", times=99)) as proxy:
        reader = opened(bucket(proxy.url), tmp_path / "reader")
        assert reader.head() == reader.head() == reader.head() == published
        assert [seen.status for seen in proxy.of("GET", "policy/HEAD")] == [200, 200, 200]
        assert len(proxy.of("GET", "manifest.json")) == 1
        etag = bucket().put("k", b"known")
        assert bucket(proxy.url).get("k", unless=etag) is None
        newer = writer.publish(adapter("v2"), version=2, step=2, epoch=epoch)
        assert reader.head() == newer


def test_a_server_that_ignores_the_condition_of_a_put_fails_the_probe(s3_server: S3Server, bucket: Bucket):
    script = Fault("strip conditions", "PUT", times=99)
    with (
        FaultProxy(s3_server, script) as proxy,
        pytest.raises(Unrecoverable, match="ignores conditional writes"),
    ):
        bucket(proxy.url).probe()
    assert bucket().list("") == []


# A version.


def test_following_is_one_304_while_nothing_changes(s3_server: S3Server, bucket: Bucket, tmp_path: Path):
    writer = opened(bucket(), tmp_path)
    published = writer.publish(adapter("v1"), version=1, step=1, epoch=writer.take_epoch())
    with FaultProxy(s3_server) as proxy:
        reader = opened(bucket(proxy.url), tmp_path / "reader")
        assert reader.head() == published
        before = len(proxy.requests)
        assert reader.head() == reader.head() == published
        polls = proxy.requests[before:]
    assert [(poll.method, poll.status) for poll in polls] == [("GET", 304)] * 2
    assert all(poll.sent + poll.received < 2000 for poll in polls)


@pytest.mark.parametrize("key", ["adapter_model.safetensors", "manifest.json", "policy/HEAD"])
@pytest.mark.parametrize("kind", ["500", "reset", "drop the answer", "cut after headers"])
def test_a_version_is_published_through_faults_at_any_of_its_parts(
    s3_server: S3Server, bucket: Bucket, tmp_path: Path, kind: Kind, key: str
):
    reader = opened(bucket(), tmp_path / "reader")
    epoch = reader.take_epoch()
    with FaultProxy(s3_server, Fault(kind, "PUT", key, times=2)) as proxy:
        published = opened(bucket(proxy.url), tmp_path).publish(adapter("v1"), version=1, step=1, epoch=epoch)
        assert len([seen for seen in proxy.requests if seen.fault]) == 2
    assert reader.head() == published
    assert contents(reader.fetch(1)) == adapter("v1")


@pytest.mark.parametrize("key", ["adapter_model.safetensors", "manifest.json", "policy/HEAD"])
def test_a_version_on_its_way_is_not_seen(s3_server: S3Server, bucket: Bucket, tmp_path: Path, key: str):
    reader = opened(bucket(), tmp_path / "reader")
    epoch = reader.take_epoch()
    old = reader.publish(adapter("v1"), version=1, step=1, epoch=epoch)
    with FaultProxy(s3_server, Fault("hold", "PUT", key)) as proxy, ThreadPoolExecutor(1) as pool:
        writer = opened(bucket(proxy.url), tmp_path)
        publishing = pool.submit(writer.publish, adapter("v2"), version=2, step=2, epoch=epoch)
        assert proxy.held.wait(30)
        assert reader.head() == old
        proxy.release()
        assert reader.head() in (old, publishing.result(30))
    head = reader.head()
    assert head is not None
    assert head.version == 2


@pytest.mark.parametrize("kind", ["500", "reset", "cut the answer", "garble the answer"])
def test_a_large_version_is_fetched_through_faults(
    s3_server: S3Server, bucket: Bucket, tmp_path: Path, kind: Kind
):
    writer = opened(bucket(), tmp_path)
    writer.publish(LARGE, version=1, step=1, epoch=writer.take_epoch())
    with FaultProxy(s3_server, Fault(kind, "GET", ".safetensors", times=2)) as proxy:
        assert contents(opened(bucket(proxy.url), tmp_path / "reader").fetch(1)) == LARGE
        parts = proxy.of("GET", ".safetensors")
    assert len([part for part in parts if part.fault]) == 2
    assert all(part.headers["Range"].startswith("bytes=") for part in parts)


def test_a_part_that_is_damaged_again_and_again_is_named(s3_server: S3Server, bucket: Bucket, tmp_path: Path):
    writer = opened(bucket(), tmp_path)
    policy = writer.publish(LARGE, version=1, step=1, epoch=writer.take_epoch())
    expected = policy.files["adapter_model.safetensors"][0]
    with FaultProxy(s3_server, Fault("garble the answer", "GET", ".safetensors", times=99)) as proxy:
        with pytest.raises(
            StoreError, match=r"v000001/adapter_model.safetensors in .* is damaged: "
        ) as caught:
            opened(bucket(proxy.url), tmp_path / "reader").fetch(1)
        assert len(proxy.of("GET", ".safetensors")) == 2 * 3
    damaged = bytearray(LARGE["adapter_model.safetensors"])
    for start in (0, 16 << 20, 32 << 20):
        damaged[start] ^= 1
    assert f"expected SHA-256 {expected}, found {hashlib.sha256(damaged).hexdigest()}, twice" in str(
        caught.value
    )


FETCHER = """
import sys
from pathlib import Path
from rolecall.runtime.cache import Cache
from rolecall.runtime.s3 import S3Objects
from rolecall.runtime.store import PolicyStore

objects = S3Objects(sys.argv[1], sys.argv[2])
print(PolicyStore(objects, cache=Cache(Path(sys.argv[3])), run="r").fetch(1))
"""


def test_the_processes_of_one_machine_share_one_download(s3_server: S3Server, bucket: Bucket, tmp_path: Path):
    objects: Any = bucket()
    writer = opened(objects, tmp_path)
    writer.publish(LARGE, version=1, step=1, epoch=writer.take_epoch())
    with FaultProxy(s3_server, Fault("hold", "GET", ".safetensors")) as proxy:
        command = [sys.executable, "-c", FETCHER, s3_server.bucket, objects.prefix, str(tmp_path / "shared")]
        environment = os.environ | {"AWS_ENDPOINT_URL": proxy.url}
        fetchers = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)
        ]
        assert proxy.held.wait(60)
        proxy.release()
        folders = {fetcher.communicate(timeout=60)[0].strip() for fetcher in fetchers}
        assert len(proxy.of("GET", ".safetensors")) == 3  # the parts of one download
    [folder] = folders
    assert contents(Path(folder)) == LARGE


# The server is killed.


class Crashes:
    """A hook that kills the server before certain requests, and lets it come back while they are tried."""

    def __init__(self, server: S3Server, *moments: tuple[str, str]) -> None:
        self.server, self.moments = server, list(moments)
        self.comebacks: list[threading.Thread] = []

    def before(self, method: str, key: str) -> None:
        if self.moments and (method, key) == self.moments[0]:
            del self.moments[0]
            self.join()
            self.server.kill()
            self.comebacks.append(threading.Thread(target=self.server.restart))
            self.comebacks[-1].start()

    def join(self) -> None:
        for comeback in self.comebacks:
            comeback.join()


def test_a_server_that_is_killed_and_comes_back_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from rolecall.runtime.s3 import S3Objects

    (tmp_path / "s3").mkdir()
    server = S3Server(tmp_path / "s3")
    server.start()
    crashes = Crashes(
        server,
        ("put", "policy/v000001/adapter_model.safetensors"),
        ("put", "policy/v000002/manifest.json"),
        ("put", "policy/HEAD"),  # of version 2
        ("get", "policy/HEAD"),  # a reader's, or the trainer's own
        ("get", "policy/v000004/adapter_model.safetensors"),
    )
    try:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        objects = S3Objects(server.bucket, "run/")
        trainer = opened(objects, tmp_path, crashes.before)
        reader = opened(objects, tmp_path / "reader", crashes.before)
        epoch = trainer.take_epoch()
        published = None
        for version in range(1, 6):
            published = trainer.publish(adapter(str(version)), version=version, step=version, epoch=epoch)
            assert reader.head() == published
            assert contents(reader.fetch(version)) == adapter(str(version))
        crashes.join()
        assert crashes.moments == []
        fresh = opened(objects, tmp_path / "fresh")
        assert fresh.head() == published
        for version in range(1, 6):
            assert contents(fresh.fetch(version)) == adapter(str(version))
    finally:
        crashes.join()
        server.stop()
