"""All attacks at once on a run that is at work: it goes on, and what it has handled is whole afterwards."""

from __future__ import annotations

import gzip
import pickle
import socket
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import msgpack
from rolecall import Unrecoverable
from rolecall.runtime.control import NODE_BITS
from rolecall.runtime.line import Batch, FarMember, Mail, Members
from rolecall.runtime.remote import TOKEN_HEADER, fetch_about
from rolecall.runtime.tokens import Ring, change

from .attackers import BODIES, NESTED, Canary
from .certificates import make_certificate
from .commands import until
from .processes import Run
from .test_relay import Visit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

MEMORY_BYTES = 192 << 20  # more than this no attack makes the proxy take


class Enemy:
    """Somebody who can reach the proxy and has a worker's token, and another who has none."""

    def __init__(self, visit: Visit) -> None:
        self.address = urllib.parse.urlsplit(visit.url)
        self.token = visit.token_file.read_text().strip()
        self.client = httpx.Client(base_url=visit.url, timeout=30.0)
        self.number = self.heard = self.ledger = 0
        self.session = ""

    def post(self, path: str, body: bytes = b"", token: str | None = None, **headers: str) -> int:
        sent = {TOKEN_HEADER: self.token if token is None else token}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            self.response = self.client.post(path, content=body, headers=sent)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            return 0  # it was hung up on in the middle of its body
        return self.response.status_code

    def join(self) -> None:
        """As a machine, with a link of its own making."""
        assert self.post("/v1/relay/join", b"../../evil\n") == 200
        joined = self.response.json()
        self.name, self.number, self.proof = (
            joined["name"],
            joined["number"],
            f"{joined['number']}.{joined['secret']}",
        )

    def open(self) -> str:
        assert self.post("/v1/relay/open", X_Rolecall_Session=self.proof) == 200
        self.session = f"{self.number}.{self.response.json()['session']}"
        self.heard = 0
        return self.session

    def exchange(self, first: int, *frames: Any, session: str | None = None, wait: str = "0.2") -> int:
        body = msgpack.encode(Batch(first, self.heard, list(frames)))
        status = self.post(f"/v1/relay?wait={wait}", body, X_Rolecall_Session=session or self.session)
        if status == 200:
            self.batch = msgpack.decode(self.response.content, type=Batch)
        return status

    def raw(self, data: bytes) -> socket.socket:
        assert self.address.hostname and self.address.port
        connection = socket.create_connection((self.address.hostname, self.address.port), timeout=30.0)
        connection.sendall(data)
        return connection

    def answer(self, data: bytes) -> bytes:
        with self.raw(data) as connection:
            return connection.recv(1 << 16)


def head(verb: str, path: str, token: str, **headers: str) -> bytes:
    lines = [f"{verb} {path} HTTP/1.1", "Host: x", f"{TOKEN_HEADER}: {token}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def peak_bytes(run: Run) -> int:
    status = Path(f"/proc/{run.pid('proxy')}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def without_a_token(enemy: Enemy, canary: bytes) -> None:
    stranger = Ring.new("run").issue("trainer", None)[1]
    bodies = [canary, b"[" * NESTED, gzip.compress(b"[" * NESTED)]
    for path in ("/v1/notes", "/v1/relay", "/v1/relay/join", "/v1/relay/open", "/v1/relay/leave", "/v1/else"):
        for token in ("", "x", stranger):
            for body in bodies:
                assert enemy.post(path, body, token, X_Rolecall_Session="1.x") in (0, 401)
    assert enemy.answer(head("POST", "/v1/notes", "", Content_Length=str(1 << 30))).startswith(
        b"HTTP/1.1 401"
    )


def with_broken_bodies(enemy: Enemy, canary: bytes) -> None:
    for as_json, as_msgpack in (*BODIES.values(), (canary, canary)):
        assert enemy.post("/v1/notes", as_json) == 422
        assert enemy.post("/v1/relay", as_msgpack, X_Rolecall_Session=enemy.session) == 422
    assert enemy.post("/v1/notes", gzip.compress(b"[" * NESTED), Content_Encoding="gzip") == 415
    for path in ("/v1/notes", "/v1/relay/join"):
        heard = enemy.answer(head("POST", path, enemy.token, Content_Length=str(1 << 30)))
        assert heard.startswith(b"HTTP/1.1 413")
    for path in ("/v1/../run", "/v1/%2e%2e/run", "/v1/run%00", "/v1/run%0a", "/v1/" + "x" * 10_000):
        assert enemy.answer(head("GET", path, enemy.token)).startswith(b"HTTP/1.1 404")


def as_another(enemy: Enemy, canary: bytes) -> None:
    """The run's honest machine has number 1."""
    for path in ("/v1/relay/open", "/v1/relay/leave"):
        assert enemy.post(path, X_Rolecall_Session=f"1.{enemy.proof.partition('.')[2]}") == 403
    assert enemy.exchange(1, session=f"1.{enemy.session.partition('.')[2]}") == 409
    assert enemy.exchange(1, session=f"999.{enemy.session.partition('.')[2]}") == 410
    me, mine, others = (f"{enemy.name}/worker",), (enemy.number << NODE_BITS) + 1, (1 << NODE_BITS) + 3
    refused = [
        (422, Mail("ledger", enemy.ledger, False, 1, mine, 0.0, ("gpu-1/worker",), "note", b"\x80")),
        (422, Mail("ledger", enemy.ledger, False, 1, mine, 0.0, (*me, "driver"), "note", b"\x80")),
        (422, Mail("ledger", enemy.ledger, False, 1, others, 0.0, me, "note", canary)),
        (422, Members([FarMember("gpu-1/worker", "worker", others, "gone", "", [])])),
        (422, Members([FarMember(f"{enemy.name}/../worker", "worker", mine, "up", "", [])])),
        (422, Members([FarMember(f"{enemy.name}/ledger", "ledger", mine, "up", "", [])])),
        (403, Mail("ledger", enemy.ledger, True, 1, mine, 5.0, me, "seen", b"\x80")),
        (403, Mail("driver", 3, False, 1, mine, 0.0, me, "on_stop", b"\x80")),
        (403, Mail("proxy", 4, False, 1, mine, 0.0, me, "on_stop", b"\x80")),
        (403, Mail("gpu-1/worker", others, False, 1, mine, 0.0, me, "hear", b"\x80")),
    ]
    for status, frame in refused:
        assert enemy.exchange(1, frame) == status, frame


def again_and_out_of_order(enemy: Enemy, canary: bytes) -> None:
    """What a worker may say, doubled, late, and from a session that has ended: it is done once."""
    me, sender = (f"{enemy.name}/worker",), (enemy.number << NODE_BITS) + 1

    def note(number: int) -> Mail:
        body = msgpack.encode({"sender": "enemy", "number": number})
        return Mail("ledger", enemy.ledger, False, number, sender, 0.0, me, "note", body)

    for _ in range(3):
        assert enemy.exchange(1, note(1)) == 200
    assert enemy.exchange(1, note(1), note(2)) == 200
    assert enemy.exchange(7, note(3)) == 409  # what is before it is missing
    old, new = enemy.session, enemy.open()
    assert enemy.exchange(1, note(3), session=old) == 409
    assert enemy.exchange(1, note(1), note(2), note(3), session=new) == 200
    assert enemy.exchange(1, note(1), note(2), note(3), session=new) == 200


def slowly(enemy: Enemy) -> list[socket.socket]:
    """Connections that are still open when the others attack."""
    beginnings = [
        b"",
        b"POST /v1/notes HTTP/1.1\r\nX: ",
        head("POST", "/v1/notes", "x", Content_Length="1000"),
        head("POST", "/v1/notes", enemy.token, Content_Length="1000") + b'{"sender": ',
    ]
    return [enemy.raw(beginning) for beginning in beginnings for _ in range(16)]


def test_a_run_at_work_is_not_disturbed(tmp_path: Path):
    canary_file = tmp_path / "canary"
    canary = pickle.dumps(Canary(canary_file))

    def story(visit: Visit) -> None:
        visit.join()
        visit.progress()
        enemy = Enemy(visit)
        enemy.join()
        enemy.open()
        assert enemy.exchange(1, wait="10") == 200
        enemy.ledger = _members(enemy.batch)["ledger"]
        before = peak_bytes(visit.run)
        held = slowly(enemy)
        attacks: list[Callable[[Enemy, bytes], None]] = [
            without_a_token, with_broken_bodies, as_another, again_and_out_of_order
        ]  # fmt: skip
        for attack in attacks:
            attack(enemy, canary)
            visit.progress()
        until(lambda: visit.notes()["enemy"] == [1, 2, 3])
        assert peak_bytes(visit.run) - before < MEMORY_BYTES
        assert enemy.post("/v1/relay/leave", X_Rolecall_Session=enemy.proof) == 200
        assert enemy.exchange(1) == 410
        for connection in held:
            connection.close()
        enemy.client.close()
        assert visit.reports("down") == visit.reports("died") == []

    visit = Visit(tmp_path, story)
    visit.go()
    visit.check()
    assert visit.notes()["enemy"] == [1, 2, 3]
    assert (visit.run.deaths, visit.run.dead_letters, canary_file.exists()) == ([], [], False)


def _members(batch: Batch) -> dict[str, int]:
    """Incarnations by name, if the run has said who is there."""
    return {
        one.name: one.incarnation
        for frame in batch.frames
        if isinstance(frame, Members)
        for one in frame.members
    }


def test_keys_change_under_a_machine_at_work(tmp_path: Path):
    """Its token file is replaced in time: it never stops. The old token is worth nothing afterwards."""

    def story(visit: Visit) -> None:
        visit.token_file = tmp_path / "nodes-token"
        old = (tmp_path / "token").read_text().strip()
        visit.token_file.write_text(old)
        node = visit.join()
        visit.progress()
        with change(tmp_path) as ring:
            new = ring.issue("worker", None)[1]
            ring.revoked.append("given")
            visit.token_file.write_text(new)
        visit.progress()
        visit.progress()
        for token, status in ((old, 401), (new, 200)):
            assert httpx.get(f"{visit.url}/v1/run", headers={TOKEN_HEADER: token}).status_code == status
        assert visit.reports("down") == []
        with change(tmp_path) as ring:
            ring.rotate(0.0, 0.0)
        assert node.wait() == 2
        assert "refused the token" in node.lines[-1]["story"]

    visit = Visit(tmp_path, story)
    visit.go()
    visit.check()


def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make_certificate(certificate, key)
    monkeypatch.setenv("ROLECALL_CA", str(certificate))

    def story(visit: Visit) -> None:
        assert visit.url.startswith("https://")
        visit.join()
        visit.progress()
        monkeypatch.delenv("ROLECALL_CA")
        with pytest.raises(Unrecoverable, match="CERTIFICATE_VERIFY_FAILED"):
            fetch_about(visit.url, visit.token_file)

    visit = Visit(tmp_path, story, tls=f"{certificate},{key}")
    visit.go()
    visit.check()
