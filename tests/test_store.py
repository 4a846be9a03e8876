"""One contract for the weight store in a folder and in an S3 bucket: publish, follow, fetch."""

from __future__ import annotations

import hashlib
import pickle
import secrets
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from rolecall.runtime.errors import Unrecoverable
from rolecall.runtime.objects import Objects, StoreError, read
from rolecall.runtime.store import PolicyStore, Store

from .s3 import S3Server
from .stores import Hook, adapter, contents, opened

# Publish, follow, fetch.


def test_a_version_is_published_followed_and_fetched(store: PolicyStore, objects: Objects, tmp_path: Path):
    reader = opened(objects, tmp_path / "elsewhere")
    assert reader.head() is None
    epoch = store.take_epoch()
    assert reader.head() is None
    policy = store.publish(adapter("v0"), version=0, step=0, epoch=epoch)
    assert (policy.version, policy.step, policy.epoch) == (0, 0, 1)
    assert reader.head() == policy == reader.policy(0)
    last = store.publish(adapter("v3"), version=3, step=7, epoch=epoch)
    assert reader.head() == last
    assert contents(reader.fetch(3)) == adapter("v3")
    assert contents(reader.fetch(0)) == adapter("v0")


def test_the_digest_is_what_its_description_says(store: PolicyStore):
    files = {"b": b"2", "a": b"1"}
    policy = store.publish(files, version=0, step=0, epoch=store.take_epoch())
    lines = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in ("a", "b"))
    assert policy.digest == hashlib.sha256(lines.encode()).hexdigest()
    assert policy.files["a"] == (hashlib.sha256(b"1").hexdigest(), 1)


def test_the_layout_is_peft_s_own(store: PolicyStore, objects: Objects):
    epoch = store.take_epoch()
    store.publish(adapter("v42"), version=42, step=42, epoch=epoch)
    store.save_checkpoint({"state.safetensors": b""}, step=200, epoch=epoch)
    assert objects.list("") == [
        "checkpoints/step-000200/e1/manifest.json",
        "checkpoints/step-000200/e1/state.safetensors",
        "policy/HEAD",
        "policy/v000042/adapter_config.json",
        "policy/v000042/adapter_model.safetensors",
        "policy/v000042/manifest.json",
    ]


def test_following_costs_one_conditional_get_while_nothing_changes(objects: Objects, tmp_path: Path):
    asked: list[tuple[str, str]] = []
    reader = opened(objects, tmp_path / "elsewhere", lambda method, key: asked.append((method, key)))
    writer = opened(objects, tmp_path)
    epoch = writer.take_epoch()
    writer.publish(adapter("v1"), version=1, step=1, epoch=epoch)
    assert reader.head() == reader.head() == reader.head()
    assert asked == [
        ("get", "policy/HEAD"),
        ("get", "policy/v000001/manifest.json"),
        *[("get", "policy/HEAD")] * 2,
    ]
    writer.publish(adapter("v2"), version=2, step=2, epoch=epoch)
    followed = reader.head()
    assert followed is not None
    assert followed.version == 2


def test_versions_only_grow(store: PolicyStore):
    epoch = store.take_epoch()
    store.publish(adapter("v5"), version=5, step=5, epoch=epoch)
    for version in (4, 5):
        with pytest.raises(StoreError, match="is at version 5"):
            store.publish(adapter("again"), version=version, step=6, epoch=epoch)
    assert contents(store.fetch(5)) == adapter("v5")


def test_an_unknown_version_is_named(store: PolicyStore):
    with pytest.raises(StoreError, match="run 'r' has no version 7: it was never published, or collected"):
        store.fetch(7)


@pytest.mark.parametrize("name", ["../v1", "a/b", ".hidden", "", "manifest.json"])
def test_bad_file_names_are_refused(store: PolicyStore, objects: Objects, name: str):
    epoch = store.take_epoch()
    with pytest.raises(ValueError, match=r"bad (file name|object key)|manifest\.json"):
        store.publish({name: b""}, version=1, step=1, epoch=epoch)
    with pytest.raises(ValueError, match=r"bad (file name|object key)|manifest\.json"):
        store.save_checkpoint({name: b""}, step=1, epoch=epoch)
    assert objects.list("") == ["policy/HEAD"]


# What is fetched is what was published.


def mended_before_the_second_get(objects: Objects, key: str, good: bytes) -> Hook:
    gets = iter(range(2))

    def before(method: str, asked: str) -> None:
        if asked == key and next(gets) == 1:  # a third would be one too many
            objects.put(key, good)

    return before


def test_a_corrupted_object_is_fetched_again_and_then_named(objects: Objects, tmp_path: Path):
    key = "policy/v000001/adapter_model.safetensors"
    writer = opened(objects, tmp_path)
    policy = writer.publish(adapter("v1"), version=1, step=1, epoch=writer.take_epoch())
    good = read(objects, key)[0]
    objects.put(key, b"damaged")
    expected, found = policy.files["adapter_model.safetensors"][0], hashlib.sha256(b"damaged").hexdigest()
    with pytest.raises(StoreError, match=rf"{key} in .* expected SHA-256 {expected}, found {found}, twice"):
        writer.fetch(1)
    objects.delete(key)
    with pytest.raises(StoreError, match=rf"{key} in .* expected SHA-256 {expected}, found no object"):
        writer.fetch(1)
    objects.put(key, b"damaged")
    mended = mended_before_the_second_get(objects, key, good)
    assert contents(opened(objects, tmp_path, mended).fetch(1)) == adapter("v1")


def test_a_version_that_is_collected_while_it_is_fetched_says_so(objects: Objects, tmp_path: Path):
    trainer = opened(objects, tmp_path)
    epoch = trainer.take_epoch()
    for version in range(3):
        trainer.publish(adapter(str(version)), version=version, step=version, epoch=epoch)

    def collect(method: str, key: str) -> None:
        if key == "policy/v000001/adapter_config.json":
            trainer.collect(keep=0)

    with pytest.raises(StoreError, match="run 'r' has no version 1: it was never published, or collected"):
        opened(objects, tmp_path / "elsewhere", collect).fetch(1)


def test_a_damaged_head_or_manifest_is_read_again_and_then_named(objects: Objects, tmp_path: Path):
    trainer = opened(objects, tmp_path)
    epoch = trainer.take_epoch()
    policy = trainer.publish(adapter("v1"), version=1, step=1, epoch=epoch)
    for key, kind in (("policy/v000001/manifest.json", "PolicyVersion"), ("policy/HEAD", "Head")):
        good = read(objects, key)[0]
        objects.put(key, b"not JSON")
        named = rf"{key} in .* is damaged: expected the JSON of a {kind}, found b'not JSON' .*, twice; "
        with pytest.raises(StoreError, match=named):
            opened(objects, tmp_path / "elsewhere").head()

        mended = mended_before_the_second_get(objects, key, good)
        assert opened(objects, tmp_path / "elsewhere", mended).head() == policy
    objects.put("policy/HEAD", b"not JSON")
    with pytest.raises(StoreError, match=r"policy/HEAD in .* is damaged"):
        trainer.publish(adapter("v2"), version=2, step=2, epoch=epoch)


@pytest.mark.parametrize("name", ["../../escaped", "/escaped", "a/b", ".hidden", "manifest.json"])
def test_a_manifest_cannot_lead_out_of_its_folder(objects: Objects, tmp_path: Path, name: str):
    """Whoever can write to the bucket could name any file of the machines that fetch from it."""
    trainer = opened(objects, tmp_path)
    policy = trainer.publish(adapter("v1"), version=1, step=1, epoch=trainer.take_epoch())
    key = "policy/v000001/manifest.json"
    forged = msgspec.structs.replace(policy, files={name: policy.files["adapter_config.json"]})
    objects.put(key, msgspec.json.encode(forged))
    with pytest.raises(StoreError, match=rf"{key} in .* is damaged: .*(bad|manifest.json)"):
        opened(objects, tmp_path / "elsewhere").fetch(1)
    other = msgspec.structs.replace(policy, digest="0" * 64)
    objects.put(key, msgspec.json.encode(other))
    with pytest.raises(StoreError, match=rf"{key} .*digest {policy.digest} for its files, found 0000"):
        opened(objects, tmp_path / "elsewhere").fetch(1)


def test_those_who_fetch_one_version_share_one_download(objects: Objects, tmp_path: Path):
    writer = opened(objects, tmp_path / "elsewhere")
    writer.publish(adapter("v1"), version=1, step=1, epoch=writer.take_epoch())
    asked: Counter[str] = Counter()
    lock = threading.Lock()

    def count(method: str, key: str) -> None:
        with lock:
            asked[key] += 1

    readers = [
        opened(objects, tmp_path, count) for _ in range(8)
    ]  # a cache of its own each, as processes have
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda reader: reader.fetch(1), readers))
    assert len(folders) == 1
    assert asked["policy/v000001/adapter_model.safetensors"] == 1


def test_a_damaged_cache_is_filled_again(store: PolicyStore, tmp_path: Path):
    store.publish(adapter("v1"), version=1, step=1, epoch=store.take_epoch())
    (tmp_path / "cache" / ".partial").mkdir(parents=True)  # whoever downloaded last was killed
    (tmp_path / "cache" / ".partial" / "leftover").write_bytes(b"")
    folder = store.fetch(1)
    assert contents(folder) == adapter("v1")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert contents(store.fetch(1)) == adapter("v1")
    (folder / "adapter_config.json").unlink()
    assert contents(store.fetch(1)) == adapter("v1")


def test_the_cache_keeps_the_newest_versions(store: PolicyStore, tmp_path: Path):
    epoch = store.take_epoch()
    for version in range(12):
        store.publish(adapter(str(version)), version=version, step=version, epoch=epoch)
        store.fetch(version)
    assert [int(path.name[1:7]) for path in sorted((tmp_path / "cache").glob("v*"))] == list(range(4, 12))
    assert contents(store.fetch(2)) == adapter("2")


def test_a_version_that_a_reader_holds_stays_on_the_disk(objects: Objects, tmp_path: Path):
    trainer = opened(objects, tmp_path)
    slow, engine = opened(objects, tmp_path), opened(objects, tmp_path)  # two processes' views of one cache
    epoch = trainer.take_epoch()
    kept: dict[int, Path] = {}
    for version in range(24):
        trainer.publish(adapter(str(version)), version=version, step=version, epoch=epoch)
        trainer.fetch(version)
        if version == 0:
            kept[0] = slow.fetch(0)
        if version in (1, 2, 3):  # an engine that may read the last two again
            kept[version] = engine.fetch(version, keep={version - 1})
    cached = {int(path.name[1:7]) for path in (tmp_path / "cache").glob("v*")}
    assert cached == {0, 2, 3, *range(16, 24)}
    assert contents(kept[0]) == adapter("0")
    assert contents(kept[2]) == adapter("2")
    assert not kept[1].exists()
    slow.fetch(23)
    engine.fetch(23, keep=(3,))
    trainer.publish(adapter("24"), version=24, step=24, epoch=epoch)
    trainer.fetch(24)
    assert {int(path.name[1:7]) for path in (tmp_path / "cache").glob("v*")} == {3, *range(17, 25)}
    leases = {path.name[1:] for path in (tmp_path / "cache").glob(".v*")}
    assert leases == {f"{path.name}.lease" for path in (tmp_path / "cache").glob("v*")}


@pytest.mark.slow
def test_what_a_killed_reader_held_goes(tmp_path: Path):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from rolecall.runtime.store import Store\n"
        "store = Store('file://').open('r', Path(sys.argv[1]))\n"
        "print(store.fetch(0), flush=True)\n"
        "sys.stdin.read()\n"
    )
    trainer = Store().open("r", tmp_path)
    epoch = trainer.take_epoch()
    trainer.publish(adapter("0"), version=0, step=0, epoch=epoch)
    command = [sys.executable, "-c", program, str(tmp_path)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    held = Path(reader.stdout.readline().strip())
    for version in range(1, 12):
        trainer.publish(adapter(str(version)), version=version, step=version, epoch=epoch)
        trainer.fetch(version)
    assert contents(held) == adapter("0")
    reader.kill()
    reader.communicate()
    trainer.publish(adapter("12"), version=12, step=12, epoch=epoch)
    trainer.fetch(12)
    assert not held.exists()


def test_a_cache_that_cannot_be_written_is_named(store: PolicyStore, tmp_path: Path):
    store.publish(adapter("v1"), version=1, step=1, epoch=store.take_epoch())
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(StoreError, match=rf"v000001-.* cannot be kept in {tmp_path}/cache: .*the space left"):
        store.fetch(1)


# Where a store is.


@pytest.mark.parametrize(
    "url",
    [
        "",
        "runs/store",
        "/runs/store",
        "s3://",
        "s3:///prefix",
        "s3://Bucket",
        "s3://bucket/../other",
        "s3://bucket/a b",
        "s3://bucket:80/x",
        "s3://[",
        "file://relative/folder",
        "https://example.com/bucket",
        "gs://bucket",
    ],
)
def test_a_url_that_is_no_store_ends_the_run_with_one_sentence(url: str):
    with pytest.raises(
        Unrecoverable, match=r": a store is s3://bucket/prefix, file:///folder, or file:// "
    ) as caught:
        Store(url)
    assert caught.value.exit_code == 2
    assert url in str(caught.value) or url == "s3://["


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hush@bucket/x",
        "s3://bucket/x?secret=hush",
        "s3://bucket/x#hush",
        "AKIA:hush@bucket",
        "file://u:hush@h/x",
    ],
)
def test_secrets_in_a_url_are_refused_and_not_repeated(url: str):
    with pytest.raises(Unrecoverable, match="has no user, password, query or fragment") as caught:
        Store(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["file://", "file:///srv/a@b", "s3://bucket", "s3://bucket/", "s3://my.bucket-1/a/b_c"]
)
def test_a_store_can_be_sent_to_another_process(url: str):
    assert pickle.loads(pickle.dumps(Store(url))) == Store(url)


@pytest.mark.parametrize("run", ["", "..", "a/b", "../x", "a b", ".a"])
def test_bad_run_ids_are_refused(tmp_path: Path, run: str):
    with pytest.raises(ValueError, match="bad"):
        Store().open(run, tmp_path)


def test_a_store_is_where_its_url_says(tmp_path: Path):
    (folder := tmp_path / "run").mkdir()
    for url, place in (("file://", folder / "store"), (f"file://{tmp_path}/shared", tmp_path / "shared")):
        store = Store(url).open("r-1", folder)
        store.probe()
        store.publish(adapter("v1"), version=1, step=1, epoch=store.take_epoch())
        assert (place / "r-1" / "policy" / "HEAD").exists()
        assert store.fetch(1).parent == folder / "cache"


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "/", "/some/prefix", "/some/prefix/"])
def test_a_bucket_is_where_its_url_says(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
):
    from rolecall.runtime.s3 import S3Objects

    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    run = f"run-{secrets.token_hex(4)}"
    store = Store(f"s3://{s3_server.bucket}{prefix}").open(run, tmp_path)
    store.probe()
    store.publish(adapter("v1"), version=1, step=1, epoch=store.take_epoch())
    assert contents(store.fetch(1)) == adapter("v1")
    below = f"{prefix.strip('/')}/{run}/".lstrip("/")
    assert S3Objects(s3_server.bucket).list(f"{below}policy/HEAD") == [f"{below}policy/HEAD"]
