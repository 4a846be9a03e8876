"""Objects in an S3 bucket. boto3 is slow to import, so only a store that has a bucket imports this module."""

from __future__ import annotations

import base64
import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import boto3.session
from botocore import exceptions as boto
from botocore.config import Config
from botocore.exceptions import ClientError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from .errors import RolecallError, Unrecoverable
from .objects import Conflict, Missing, StoreError, check_key, prove, read

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import PutObjectRequestTypeDef

__all__ = ["S3Objects"]

T = TypeVar("T")

_PART = 16 << 20  # bytes; with 8 MB a fetch took a tenth longer, for the requests, with one of 64 MB, too
_STREAMS = 4  # parts of one object that travel at once
# Servers that refuse, or do not check, the checksums that boto adds on its own.
_WANT_MD5 = (".hf.co", ".r2.cloudflarestorage.com", ".backblazeb2.com")
# Codes of a body that was cut or changed on its way to the server.
_GARBLED = ("RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch")


class S3Objects:
    """Objects in an S3 bucket, below `prefix`.

    Endpoint, region and credentials come from the standard AWS environment variables and configuration files.
    patience_s: how long failures that may pass (500, 503, time-outs, resets) are retried. Nothing below
    retries: what is retried how often is decided in one place.
    read_timeout_s: how long the server may say nothing.
    """

    def __init__(
        self, bucket: str, prefix: str = "", *, patience_s: float = 60.0, read_timeout_s: float = 30.0
    ) -> None:
        self.bucket, self.prefix, self.patience_s = bucket, prefix, patience_s
        try:
            session = boto3.session.Session()  # one for both: it has read what S3 is like after the first
            self._client = _s3_client(session, read_timeout_s)
            if settings := _settings_for(self.endpoint):
                self._client = _s3_client(session, read_timeout_s, **settings)
        except (boto.BotoCoreError, ValueError) as error:  # an unknown profile; a URL without http://
            way_out = "correct the AWS_* variables or the AWS configuration files"
            raise Unrecoverable(
                f"no client for bucket {bucket!r}: {error}; {way_out}", exit_code=2
            ) from error

    @property
    def endpoint(self) -> str:
        return self._client.meta.endpoint_url

    @property
    def place(self) -> str:
        return f"bucket {self.bucket!r} at {self.endpoint}"

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        request: PutObjectRequestTypeDef = {"Bucket": self.bucket, "Key": self._key(key), "Body": data}
        if if_absent:
            request["IfNoneMatch"] = "*"
        if if_match is not None:
            request["IfMatch"] = if_match
        if self._client.meta.config.request_checksum_calculation == "when_required":  # type: ignore[attr-defined]
            request["ContentMD5"] = _md5(data)  # with no checksum, a cut upload can leave an empty object
        tries = 0

        def attempt() -> str:
            nonlocal tries
            tries += 1
            return self._client.put_object(**request)["ETag"]

        try:
            return self._retried(key, attempt)
        except Conflict:
            if tries == 1:
                raise
            # An earlier try may have won and its answer been lost: then what lies there is ours.
            found, etag = read(self, key)
            if found != data:
                raise
            return etag

    def get(self, key: str, *, unless: str | None = None) -> tuple[bytes, str] | None:
        where = {"Bucket": self.bucket, "Key": self._key(key)} | ({"IfNoneMatch": unless} if unless else {})

        def attempt() -> tuple[bytes, str] | None:
            try:
                answer = self._client.get_object(**where)  # type: ignore[arg-type]
            except ClientError as error:
                if _status(error) == 304:
                    return None
                raise
            data = _body(answer["Body"])
            # Some gateways ignore the condition; the etag tells all the same.
            return None if answer["ETag"] == unless else (data, answer["ETag"])

        return self._retried(key, attempt)

    def stream(self, key: str, size: int) -> Iterator[bytes]:
        if size <= _PART:
            yield read(self, key)[0]
            return
        with ThreadPoolExecutor(_STREAMS) as pool:
            ahead: deque[Future[bytes]] = deque()
            for start in range(0, size, _PART):
                # The last part is open-ended, so an object that is too long does not pass for a whole one.
                end = start + _PART - 1 if start + _PART < size else ""
                ahead.append(pool.submit(self._part, key, f"bytes={start}-{end}"))
                if len(ahead) > _STREAMS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _part(self, key: str, part: str) -> bytes:
        where = {"Bucket": self.bucket, "Key": self._key(key), "Range": part}

        def attempt() -> bytes:
            try:
                answer = self._client.get_object(**where)  # type: ignore[arg-type]
            except ClientError as error:
                if _status(error) == 416:  # the object ends before this part: its hash will tell
                    return b""
                raise
            return _body(answer["Body"])

        return self._retried(key, attempt)

    def list(self, prefix: str) -> list[str]:
        def attempt() -> list[str]:
            pages = self._client.get_paginator("list_objects_v2")
            found = pages.paginate(Bucket=self.bucket, Prefix=self.prefix + prefix).search("Contents[].Key")
            return sorted(key.removeprefix(self.prefix) for key in found if key is not None)

        return self._retried(prefix, attempt)

    def delete(self, key: str) -> None:
        self._retried(key, lambda: self._client.delete_object(Bucket=self.bucket, Key=self._key(key)))

    def probe(self) -> None:
        prove(S3Objects(self.bucket, self.prefix, patience_s=2, read_timeout_s=3))

    def _key(self, key: str) -> str:
        return self.prefix + check_key(key)

    def _retried(self, key: str, attempt: Callable[[], T]) -> T:
        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_random_exponential(multiplier=0.25, max=8),
            stop=stop_after_delay(self.patience_s),
            reraise=True,
        )
        try:
            return retrying(attempt)
        except ClientError as error:
            raise self._translated(key, error, retrying.statistics["attempt_number"]) from error
        except (boto.NoCredentialsError, boto.PartialCredentialsError) as error:
            keys = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile with AWS_PROFILE"
            raise Unrecoverable(f"no credentials for {self.place}: {keys}", exit_code=2) from error
        except boto.BotoCoreError as error:
            way_out = "check that the server runs and that AWS_ENDPOINT_URL and the network lead to it"
            tries = retrying.statistics["attempt_number"]
            raise StoreError(f"{key} in {self.place}: {error} (tries: {tries}); {way_out}") from error

    def _translated(self, key: str, error: ClientError, tries: int) -> RolecallError:
        code = error.response.get("Error", {}).get("Code", "unknown")
        if code == "NoSuchBucket":
            way_out = "create it, or correct the store's URL"
            return Unrecoverable(f"there is no {self.place}: {way_out}", exit_code=2)
        if _status(error) in (401, 403):
            return Unrecoverable(
                f"{self.place} refused these credentials ({code} for {key}): check AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, and that they may get, put, delete and list its objects",
                exit_code=2,
            )
        # AWS answers 404 to an If-Match when there is no object.
        if _status(error) == 412 or (_status(error) == 404 and error.operation_name == "PutObject"):
            return Conflict(f"{key} in {self.place} exists already or is not the object that was expected")
        if _status(error) == 404:
            return Missing(f"there is no {key} in {self.place}")
        way_out = "check the server's state and its log"
        return StoreError(f"{key} in {self.place}: {error} (tries: {tries}); {way_out}")


def _s3_client(
    session: boto3.session.Session, read_timeout_s: float, *, addressing: str = "auto", **settings: Any
) -> S3Client:
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": addressing},  # type: ignore[typeddict-item]
        retries={"total_max_attempts": 1},  # type: ignore[typeddict-item]
        connect_timeout=3,
        read_timeout=read_timeout_s,
        tcp_keepalive=True,
        max_pool_connections=4 * _STREAMS,
        **settings,
    )
    return session.client("s3", config=config)


def _settings_for(endpoint: str) -> dict[str, str]:
    """What servers other than Amazon's need: they seldom have a host name for each bucket."""
    host = f".{urlsplit(endpoint).hostname}"
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return {}
    settings = {"addressing": "path"}
    if host.endswith(_WANT_MD5):
        settings["request_checksum_calculation"] = settings["response_checksum_validation"] = "when_required"
    return settings


def _body(stream: StreamingBody) -> bytes:
    """Not `with stream`: that gives the raw stream, which checks neither length nor checksum."""
    with closing(stream):
        return stream.read()


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, ClientError):
        # 409: lost a race of conditional writes that are still under way; AWS says to try again.
        code = error.response.get("Error", {}).get("Code")
        return _status(error) in (409, 429) or _status(error) >= 500 or code in _GARBLED
    return isinstance(
        error,
        (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, boto.FlexibleChecksumError),
    )


def _status(error: ClientError) -> int:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
