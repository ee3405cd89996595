"""Steps with and without TLS: the same job twice, in clear and with the certificates and tokens of a laboratory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import ours
from benchmarks.cluster import running_cluster
from benchmarks.crew import Crew
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.settings import BulkSecurity
from ps_server.certs import CertificateFolder

WITHOUT, WITH, TOKEN_ONLY = "without tls", "with tls", "with tls, payload in clear"


def key(transport: str, how: str, nbytes: int) -> Key:
    """The row of a step."""
    return Key(f"{ours.system(transport)} {how}", ours.STEP, nbytes)


def subject(transport: str, how: str, nbytes: int) -> Subject:
    """``ours.STEP`` over ``transport``; ``how``: WITHOUT, WITH or TOKEN_ONLY."""

    @contextmanager
    def opened() -> Iterator[Crew]:
        with ExitStack() as stack:
            servers, worker = ({}, {}) if how == WITHOUT else stack.enter_context(laboratory(how == TOKEN_ONLY))
            with environment(servers):
                cluster = stack.enter_context(running_cluster())
            with environment(worker):
                child = stack.enter_context(Child(ours.worker, 0, cluster.address, transport, nbytes, 1, {}))
                child.ready()
            yield Crew([child], cluster.shards)

    return Subject((key(transport, how, nbytes),), opened)


@contextmanager
def laboratory(token_only: bool = False) -> Iterator[tuple[Mapping[str, str], Mapping[str, str]]]:
    """The environment of servers, and that of a worker, with certificates that end with the block."""
    with tempfile.TemporaryDirectory(prefix="ps-bench-tls-") as path:
        folder = CertificateFolder(Path(path) / "certs")
        folder.make(1, [])
        bulk = {"bulk": BulkSecurity.TOKEN_ONLY} if token_only else {}
        server = folder.settings("shard-0", require_client=False).with_given(**bulk)
        worker = folder.settings("worker", role=AccessRole.WORKER).with_given(**bulk)
        yield server.environment, worker.environment


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What processes started in the block inherit besides."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
