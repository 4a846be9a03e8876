"""What a rented machine needs to know and nobody else may: the run's token, the bucket's keys, the gateway's pass,
a pass to gated models."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Unrecoverable
from ..remote import BEARER

__all__ = ["AWS", "BEARER", "HF_TOKEN", "MODEL_TOKEN", "TOKEN", "aws_keys", "model_token", "store_and_keys"]

TOKEN = "ROLECALL_TOKEN"  # noqa: S105  the variable's name, not a secret
MODEL_TOKEN = "ROLECALL_HF_TOKEN"  # noqa: S105  here, where HF_TOKEN is one that may do more than read models
HF_TOKEN = "HF_TOKEN"  # noqa: S105  there
_NEEDED = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
AWS = (*_NEEDED, "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION", *_ENDPOINTS)
HUB_GATEWAY = "https://s3.hf.co"  # https://huggingface.co/docs/hub/storage-buckets-s3


def aws_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that lead to a bucket. Profiles and instance roles are of one machine and do not travel."""
    return {name: environment[name] for name in AWS if environment.get(name)}


def model_token(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable by which machines may read gated models; empty if none was set aside for them."""
    token = environment.get(MODEL_TOKEN)
    return {HF_TOKEN: token} if token else {}


def store_and_keys(bucket: str, environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The `store` setting for `--bucket`, and the variables that lead to it.

    bucket: s3://name/prefix, or namespace/name for a Storage Bucket of Hugging Face, reached by its S3 gateway.
    Raises Unrecoverable (exit code 2) for neither, or without keys.
    """
    keys = aws_keys(environment)
    for name in _NEEDED:
        if name not in keys:
            raise Unrecoverable(
                f"{name} is not set: the jobs need keys to the bucket, and profiles don't travel; for a Storage "
                "Bucket, make S3 credentials at https://huggingface.co/settings/tokens",
                exit_code=2,
            )
    if bucket.startswith("s3://"):
        return bucket, keys
    namespace, slash, name = bucket.partition("/")
    if not (namespace and slash and name) or "/" in name or ":" in bucket:
        raise Unrecoverable(
            f"--bucket {bucket}: write it as namespace/name or as s3://name/prefix", exit_code=2
        )
    # The gateway has one region, and wants the namespace in its address.
    for endpoint in _ENDPOINTS:
        keys.pop(endpoint, None)
    keys |= {
        "AWS_ENDPOINT_URL": f"{HUB_GATEWAY}/{namespace}",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    return f"s3://{name}/rolecall", keys
