"""Who may do what at the proxy: tokens signed with a key of the run, and the file with the run's keys.

    rc1.<base64url of msgpack {run, scope, id, expires}>.<base64url of HMAC-SHA256 of what is before this dot>

A token says for itself what it allows, so nothing but keys and what was revoked must be kept, in RUN/keys (mode 0600).
Nothing of a token is decoded before its signature holds. Any process of the run's machine may change the keys; the
proxy sees it at the next request.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct, json, msgpack

from .errors import RolecallError, Unrecoverable

__all__ = ["SCOPES", "Forbidden", "Keys", "Ring", "Scope", "Token", "Unauthorized", "change", "prepare", "seconds",
           "write_private"]  # fmt: skip

Scope = Literal["worker", "trainer"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
FORM = "rc1"
MAX_CHARACTERS = 1024  # of a token


class Unauthorized(RolecallError):
    """No token of this run, or one that holds no longer."""


class Forbidden(RolecallError):
    """A token of this run, which does not allow this."""


class Token(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a token says. scope: worker: take prompts, hand in groups, join; trainer: all that machines may ask.
    expires: in seconds since 1970; None: with the run."""

    run: str
    scope: Scope
    id: str
    expires: float | None = None

    def may(self, scope: Scope) -> bool:
        return scope in ("worker", self.scope)


class _Key(Struct):
    """secret: signs tokens; or, if `given`, the SHA-256 of a token that was made elsewhere and is a worker's.
    until: when it ends, in seconds since 1970; None: with the run."""

    secret: bytes
    until: float | None = None
    given: bool = False


_decode = msgpack.Decoder(Token).decode


class Ring(Struct):
    """The keys of a run, the newest last, and the ids of tokens that were revoked."""

    run: str
    keys: list[_Key]
    revoked: list[str] = []

    @classmethod
    def new(cls, run: str, given: str = "") -> Ring:
        """given: a token that somebody has made before the run; it allows what a worker's does."""
        keys = [_Key(hashlib.sha256(given.encode()).digest(), given=True)] if given else []
        return cls(run, [*keys, _Key(secrets.token_bytes(32))])

    def issue(self, scope: Scope, expires: float | None) -> tuple[Token, str]:
        """A new token, and its text."""
        token = Token(run=self.run, scope=scope, id=secrets.token_hex(4), expires=expires)
        signed = f"{FORM}.{_text(msgpack.encode(token))}"
        return token, f"{signed}.{_signature(self.keys[-1].secret, signed)}"

    def check(self, text: str, now: float) -> Token:
        """Raises Unauthorized. How long it takes says nothing of any key."""
        text = text[: MAX_CHARACTERS + 1]
        signed, _, signature = text.rpartition(".")
        digest, held, given = hashlib.sha256(text.encode()).digest(), False, False
        for key in self.keys:
            lives = key.until is None or now < key.until
            if key.given:
                given |= hmac.compare_digest(digest, key.secret) and lives
            else:
                expected = _signature(key.secret, signed)
                held |= hmac.compare_digest(expected.encode(), signature.encode()) and lives
        if given and "given" not in self.revoked:
            return Token(run=self.run, scope="worker", id="given")
        if not held:
            raise Unauthorized("this is no token of this run")
        # It is ours, so from here on it is well formed.
        token = _decode(_bytes(signed.removeprefix(f"{FORM}.")))
        if token.expires is not None and now >= token.expires:
            raise Unauthorized("this token has expired")
        if token.id in self.revoked or token.run != self.run:
            raise Unauthorized("this token has been revoked")
        return token

    def rotate(self, now: float, grace_s: float) -> None:
        """A new key; what the ones before it have signed holds for `grace_s` more."""
        until = now + grace_s
        for key in self.keys:
            key.until = until if key.until is None else min(key.until, until)
        self.keys = [key for key in self.keys if key.until is not None and key.until > now]
        self.keys.append(_Key(secrets.token_bytes(32)))


class Keys:
    """Checks tokens by the keys in a file, which is read again whenever it has changed."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._seen: tuple[int, int] | None = None

    def check(self, text: str) -> Token:
        """Raises Unauthorized, and OSError if there is no such file any more: then nobody is let in."""
        stat = self._path.stat()
        if self._seen != (seen := (stat.st_ino, stat.st_mtime_ns)):
            self._ring = json.decode(self._path.read_bytes(), type=Ring)
            self._seen = seen
        return self._ring.check(text, self._clock())


def prepare(token_file: Path, run: str) -> Path:
    """See that the run has keys, and that `token_file` holds a worker's token; one that is there already holds. Where
    the keys are."""
    keys = token_file.with_name("keys")
    if not keys.exists():
        given = token_file.read_text().strip() if token_file.exists() else ""
        ring = Ring.new(run, given)
        if not given:
            write_private(token_file, f"{ring.issue('worker', None)[1]}\n".encode())
        write_private(keys, json.encode(ring))
    return keys


@contextmanager
def change(run: Path) -> Iterator[Ring]:
    """The keys of the run in this folder, to be changed. Raises Unrecoverable (exit code 2) if it has none."""
    keys = run / "keys"
    if not keys.exists():
        raise Unrecoverable(
            f"{run.name} has no keys: only a run that was started with --proxy has tokens", exit_code=2
        )
    folder = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # of two changes at once neither is lost
        ring = json.decode(keys.read_bytes(), type=Ring)
        yield ring
        write_private(keys, json.encode(ring))
    finally:
        os.close(folder)


def seconds(option: str, text: str) -> float:
    """90s, 45m, 12h or 1d in seconds. Raises Unrecoverable (exit code 2), naming the option."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text, re.ASCII)
    if match is None:
        raise Unrecoverable(f"{option} {text}: write it as 90s, 45m, 12h or 1d", exit_code=2)
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def write_private(path: Path, data: bytes) -> None:
    """As `write_whole`, and from the first moment nobody else may read it."""
    aside = path.with_name(f"{path.name}.new")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    aside.replace(path)


def _signature(key: bytes, signed: str) -> str:
    return _text(hmac.digest(key, signed.encode(), "sha256"))


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
