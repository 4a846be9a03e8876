"""What a machine needs to reach a run on another one: its token, and what the run says of itself."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import RolecallError, Unrecoverable

if TYPE_CHECKING:
    import httpx

__all__ = ["BEARER", "CA", "GIVE_UP_S", "SESSION_HEADER", "TOKEN_HEADER", "NoAnswer", "authorized", "fetch_about",
           "is_own_authority", "read_token", "trusted"]  # fmt: skip

TOKEN_HEADER = "X-Rolecall-Token"  # noqa: S105  the header's name, not a secret; gateways need Authorization
SESSION_HEADER = "X-Rolecall-Session"  # a machine's number, and after a dot its session with the relay
BEARER = "ROLECALL_BEARER"  # the variable with what a platform's gateway wants as Authorization: Bearer
CA = "ROLECALL_CA"  # the variable with a file of certificates that the run's is checked by, instead of the system's
GIVE_UP_S = 120.0  # a proxy that restarts is back within seconds; a run that has ended never is


class NoAnswer(Unrecoverable):
    """Nobody answers for the run, or only a gateway. Whoever was a part of it may ask again."""


def read_token(path: Path) -> str:
    """The run's token. Raises Unrecoverable (exit code 2) if the file can't be read or is empty."""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise Unrecoverable(
            f"can't read the token file {path}: {error.strerror}; copy it from the machine the run was started on",
            exit_code=2,
        ) from error
    if not token:
        raise Unrecoverable(f"the token file {path} is empty: copy it again", exit_code=2)
    return token


def authorized(token: str) -> dict[str, str]:
    """Headers with the run's own token and, if the run is behind a platform's gateway, what that asks for."""
    bearer = os.environ.get(BEARER)
    return {TOKEN_HEADER: token} | ({"Authorization": f"Bearer {bearer}"} if bearer else {})


def trusted() -> ssl.SSLContext | bool:
    """What an httpx client is to trust. Raises Unrecoverable (exit code 2) if that can't be read."""
    path = os.environ.get(CA)
    if not path:
        return True
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise Unrecoverable(f"can't read certificates from {path}: {error}", exit_code=2) from error


def is_own_authority(certificate: Path) -> bool:
    """Whether it has signed itself, so that nobody trusts it who was not given it. Raises Unrecoverable (exit code 2)
    if it can't be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(certificate)
    except (OSError, ssl.SSLError) as error:
        raise Unrecoverable(f"can't read certificates from {certificate}: {error}", exit_code=2) from error
    return any(known["subject"] == known["issuer"] for known in context.get_ca_certs())


def fetch_about(url: str, token_file: Path) -> dict[str, Any]:
    """What a run says of itself: recipe, config. Raises Unrecoverable (exit code 2) if there is none, and RolecallError
    if it refuses; NoAnswer where that may change."""
    import httpx

    headers = authorized(read_token(token_file))
    try:
        response = httpx.get(f"{url}/v1/run", headers=headers, timeout=10.0, verify=trusted())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswer(
            f"no run answers at {url} ({error}): check the address, and that the run was started with --proxy",
            exit_code=2,
        ) from error
    if response.status_code == 410:
        raise Unrecoverable(f"the run at {url} has ended: there is nothing left to join", exit_code=2)
    _check(response, url)
    return response.json()


def _check(response: httpx.Response, url: str) -> None:
    if response.status_code == 401:
        raise Unrecoverable(
            f"the run at {url} refused the token: copy its token file again (it is named when the run starts)",
            exit_code=2,
        )
    if response.status_code >= 400:
        passing = response.status_code >= 500  # of a gateway, or of a proxy that restarts
        raise (NoAnswer if passing else RolecallError)(
            f"{url} refused the request with {response.status_code}: {response.text[:500]}"
        )
