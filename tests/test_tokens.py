"""Tokens: what they say, when they hold no longer, and that nothing of one is looked at before its signature holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec import json, msgpack
from rolecall.runtime import tokens
from rolecall.runtime.cli import main
from rolecall.runtime.errors import Unrecoverable
from rolecall.runtime.runs import create_run
from rolecall.runtime.tokens import Keys, Ring, Token, Unauthorized, change, prepare, seconds

NOW = 1_000_000.0


def refused(ring: Ring, text: str, now: float = NOW) -> str:
    with pytest.raises(Unauthorized) as caught:
        ring.check(text, now)
    return str(caught.value)


def test_a_token_says_what_it_allows():
    ring = Ring.new("r1")
    worker, text = ring.issue("worker", None)
    assert ring.check(text, NOW) == worker == Token(run="r1", scope="worker", id=worker.id)
    trainer, text = ring.issue("trainer", NOW + 60.0)
    assert ring.check(text, NOW + 59.9) == trainer
    assert [worker.may("worker"), worker.may("trainer")] == [True, False]
    assert [trainer.may("worker"), trainer.may("trainer")] == [True, True]
    assert text.startswith("rc1.") and len(text) < 200 and text.isascii()


def test_one_that_has_expired_was_revoked_or_is_of_another_run():
    ring, other = Ring.new("r1"), Ring.new("r1")
    token, text = ring.issue("worker", NOW + 60.0)
    assert refused(ring, text, NOW + 60.0) == "this token has expired"
    assert refused(other, text) == "this is no token of this run"
    ring.revoked.append(token.id)
    assert refused(ring, text) == "this token has been revoked"
    assert refused(Ring("r2", ring.keys), text) == "this token has been revoked"


def test_every_changed_character_is_noticed():
    ring = Ring.new("r1", given="a-token-from-elsewhere")
    for text in (ring.issue("worker", None)[1], "a-token-from-elsewhere"):
        ring.check(text, NOW)
        for at in range(len(text)):
            for wrong in (text[:at], text[:at] + text[at + 1 :], text[:at] + "*" + text[at + 1 :]):
                assert refused(ring, wrong) == "this is no token of this run"
        for wrong in (f"{text} ", f"{text}=", f"{text}\n", f"{text}.", text.swapcase(), text * 2, f"{text}é"):
            assert refused(ring, wrong) == "this is no token of this run"


@pytest.mark.parametrize(
    "text", ["", ".", "..", "rc1", "rc1..", "rc1.e30.", "é.é.é", "\0", "." * 100_000, "x" * 100_000]
)
def test_what_is_no_token(text: str):
    assert refused(Ring.new("r1"), text) == "this is no token of this run"


def test_nothing_is_decoded_before_the_signature_holds(monkeypatch: pytest.MonkeyPatch):
    decoded: list[bytes] = []

    def recording(data: bytes, **kwargs: object) -> Token:
        decoded.append(data)
        return msgpack.decode(data, type=Token)

    monkeypatch.setattr(tokens, "_decode", recording)
    ring, other = Ring.new("r1"), Ring.new("r1")
    text = other.issue("trainer", None)[1]
    for wrong in (text, text[:-1], f"rc1.gASVAAAA.{text.rpartition('.')[2]}", "rc1.!!.!!", ""):
        refused(ring, wrong)
    assert decoded == []
    other.check(text, NOW)
    assert len(decoded) == 1


def test_a_token_that_was_made_before_the_run_is_a_workers():
    ring = Ring.new("r1", given="made-elsewhere")
    assert ring.check("made-elsewhere", NOW) == Token(run="r1", scope="worker", id="given")
    ring.revoked.append("given")
    refused(ring, "made-elsewhere")
    ring = Ring.new("r1", given="made-elsewhere")
    ring.rotate(NOW, 60.0)
    ring.check("made-elsewhere", NOW + 59.0)
    refused(ring, "made-elsewhere", NOW + 60.0)


def test_after_a_rotation_the_old_key_holds_for_a_while():
    ring = Ring.new("r1")
    old = ring.issue("worker", None)[1]
    ring.rotate(NOW, 60.0)
    new = ring.issue("worker", None)[1]
    for text in (old, new):
        ring.check(text, NOW + 59.0)
    refused(ring, old, NOW + 60.0)
    ring.rotate(NOW + 30.0, 600.0)
    refused(ring, old, NOW + 60.0)  # a second rotation gives the first key no more time
    ring.rotate(NOW + 100.0, 0.0)
    assert len(ring.keys) == 1
    refused(ring, new, NOW + 100.0)


def test_a_change_of_the_keys_is_seen_at_the_next_request(tmp_path: Path):
    now = [NOW]
    keys = Keys(prepare(tmp_path / "token", "r1"), lambda: now[0])
    first = (tmp_path / "token").read_text().strip()
    assert keys.check(first).scope == "worker"
    with change(tmp_path) as ring:
        trainer, text = ring.issue("trainer", None)
        ring.rotate(NOW, 60.0)
        new = ring.issue("worker", None)[1]
    for one in (first, text, new):
        keys.check(one)
    with change(tmp_path) as ring:
        ring.revoked.append(trainer.id)
    keys.check(first)
    with pytest.raises(Unauthorized):
        keys.check(text)
    now[0] += 60.0
    with pytest.raises(Unauthorized):
        keys.check(first)
    keys.check(new)
    (tmp_path / "keys").unlink()
    with pytest.raises(FileNotFoundError):  # nobody is let in by keys that are not there
        keys.check(new)


def test_nobody_else_may_read_them(tmp_path: Path):
    before = os.umask(0)
    try:
        keys = prepare(tmp_path / "token", "r1")
        with change(tmp_path) as ring:
            ring.rotate(NOW, 60.0)
    finally:
        os.umask(before)
    for path in (keys, tmp_path / "token"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob("*.new"))


def test_a_run_keeps_its_keys_and_a_given_token(tmp_path: Path):
    (tmp_path / "token").write_text("made-elsewhere\n")
    keys = prepare(tmp_path / "token", "r1")
    before = keys.read_bytes()
    prepare(tmp_path / "token", "r1")  # as a proxy that restarts does
    assert keys.read_bytes() == before
    assert Keys(keys).check("made-elsewhere").id == "given"
    assert b"made-elsewhere" not in before


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = create_run(tmp_path, "far", {})
    keys = Keys(prepare(run.path / "token", run.info.id))

    def token(*arguments: str) -> str:
        assert main(["token", run.path.name, "--runs", str(tmp_path), *arguments]) == 0
        return capsys.readouterr().out

    out = token()
    assert out.endswith(": worker, id " + out.split("id ")[1].split(",")[0] + ", holds as long as the run\n")
    path = Path(out.partition(":")[0])
    assert path.stat().st_mode & 0o777 == 0o600
    worker = keys.check(path.read_text().strip())
    assert (worker.scope, worker.expires, worker.run) == ("worker", None, run.info.id)
    out = token("--scope", "trainer", "--expires", "12h")
    assert "trainer" in out and "holds for 12h" in out
    trainer = keys.check(Path(out.partition(":")[0]).read_text().strip())
    assert trainer.scope == "trainer" and trainer.expires is not None

    assert token("--revoke", worker.id) == f"{worker.id} holds no longer\n"
    with pytest.raises(Unauthorized):
        keys.check(path.read_text().strip())

    old = (run.path / "token").read_text().strip()
    assert token("--rotate", "--grace", "5m").endswith("tokens from before hold for 5m\n")
    new = (run.path / "token").read_text().strip()
    assert keys.check(old).scope == keys.check(new).scope == "worker" and old != new
    token("--rotate", "--grace", "0s")
    for gone in (old, new):
        with pytest.raises(Unauthorized):
            keys.check(gone)


def test_the_commands_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = create_run(tmp_path, "far", {})

    def refused(*arguments: str) -> str:
        assert main(["token", run.path.name, "--runs", str(tmp_path), *arguments]) == 2
        return capsys.readouterr().err

    assert "has no keys: only a run that was started with --proxy has tokens" in refused()
    prepare(run.path / "token", run.info.id)
    before = (run.path / "keys").read_bytes()
    assert "--expires soon: write it as 90s, 45m, 12h or 1d" in refused("--expires", "soon")
    assert "--grace -1s" in refused("--grace=-1s")
    assert json.decode((run.path / "keys").read_bytes()) == json.decode(before)
    assert not list(run.path.glob("token-*"))


def test_times():
    assert [seconds("--x", text) for text in ("90s", "45m", "0.5h", "1d")] == [90.0, 2700.0, 1800.0, 86400.0]
    for text in ("", "1", "h", "-1h", "1e9h", "1 h", "²h"):
        with pytest.raises(Unrecoverable, match="write it as"):
            seconds("--x", text)
