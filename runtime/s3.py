"""Objects in an S3 bucket. boto3 is slow to import, so only a store that has a bucket imports this module."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import boto3.session
from botocore import exceptions as boto
from botocore.config import Config
from botocore.exceptions import ClientError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from .errors import RolecallError, Unrecoverable
from .objects import Conflict, Missing, StoreError, check_key, prove, read

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import PutObjectRequestTypeDef

__all__ = ["S3Objects"]

T = TypeVar("T")


class S3Objects:
    """Objects in an S3 bucket, below `prefix`.

    Endpoint, region and credentials come from the standard AWS environment variables and configuration files.
    patience_s: how long failures that may pass (500, 503, time-outs, resets) are retried, on top of boto's
    own five tries; 0 gives up after two quick ones.
    """

    def __init__(self, bucket: str, prefix: str = "", *, patience_s: float = 60.0) -> None:
        self.bucket, self.prefix, self.patience_s = bucket, prefix, patience_s
        try:
            self._client = _s3_client("auto", patient=patience_s > 0)
            if "amazonaws.com" not in self.endpoint:  # other servers seldom have a host name for each bucket
                self._client = _s3_client("path", patient=patience_s > 0)
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
        except Conflict as conflict:
            if tries == 1 and not _retries_of(conflict):
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
            with answer["Body"] as body:
                # Some gateways ignore the condition; the etag tells all the same.
                return None if answer["ETag"] == unless else (body.read(), answer["ETag"])

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
        prove(S3Objects(self.bucket, self.prefix, patience_s=0))

    def _key(self, key: str) -> str:
        return self.prefix + check_key(key)

    def _retried(self, key: str, attempt: Callable[[], T]) -> T:
        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_random_exponential(multiplier=0.5, max=8),
            stop=stop_after_delay(self.patience_s),
            reraise=True,
        )
        try:
            return retrying(attempt)
        except ClientError as error:
            raise self._translated(key, error) from error
        except (boto.NoCredentialsError, boto.PartialCredentialsError) as error:
            keys = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile with AWS_PROFILE"
            raise Unrecoverable(f"no credentials for {self.place}: {keys}", exit_code=2) from error
        except boto.BotoCoreError as error:
            way_out = "check that the server runs and that AWS_ENDPOINT_URL and the network lead to it"
            raise StoreError(f"{key} in {self.place}: {error}; {way_out}") from error

    def _translated(self, key: str, error: ClientError) -> RolecallError:
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
        return StoreError(f"{key} in {self.place}: {error}; check the server's state and its log")


def _s3_client(addressing: str, *, patient: bool) -> S3Client:
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": addressing},  # type: ignore[typeddict-item]
        retries={"mode": "standard", "total_max_attempts": 5 if patient else 2},
        connect_timeout=3,
        read_timeout=30 if patient else 3,
        tcp_keepalive=True,
    )
    return boto3.session.Session().client("s3", config=config)


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, ClientError):
        # 409: lost a race of conditional writes that are still under way; AWS says to try again.
        code = error.response.get("Error", {}).get("Code")
        return _status(error) in (409, 429) or _status(error) >= 500 or code == "RequestTimeout"
    return isinstance(
        error,
        (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, boto.FlexibleChecksumError),
    )


def _status(error: ClientError) -> int:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def _retries_of(conflict: Conflict) -> int:
    cause = conflict.__cause__
    assert isinstance(cause, ClientError)
    return cause.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
