"""A coordinator with a page in this process, which may be stopped and started again in the same places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import Joined, JoinRequest, MemberStats, Role
from ps_protocol.cluster.weights import FollowAsk, PublishAsk
from ps_protocol.launch.ports import free_port
from ps_protocol.model.spec import Consistency
from ps_protocol.security.security import Security
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.history.recorder import JobRecorder
from ps_server.coordinator.main import serve_page
from ps_server.coordinator.service import MAX_REQUEST_BYTES, SERVICE_NAME, CoordinatorService
from ps_server.coordinator.settings import ClusterSettings
from ps_server.page.server import PageServer
from ps_server.serving import grpc_server
from tests.support.loops import LoopThread


class PagedCoordinator:
    """``settings`` are those of ClusterSettings. Its members are the test's own, and live without heartbeats."""

    def __init__(self, loop: LoopThread, security: Security, **settings: Any) -> None:
        self._loop = loop
        self._security = security
        self._settings = ClusterSettings(**{"heartbeat_seconds": 0.1, "lease_seconds": 600, **settings})
        #: Nobody else is given them meanwhile, where it is started again.
        self._ports = free_port(), free_port()
        self._server: grpc_server.RunningServer | None = None
        self._recording: asyncio.Task[None] | None = None
        self.page: PageServer | None = None
        self.driver: Driver | None = None
        self.address = ""

    @property
    def url(self) -> str:
        assert self.page is not None
        return self.page.url

    def start(self) -> None:
        self._loop.run(self._start())

    async def _start(self) -> None:
        self.driver = Driver(self._settings)
        recorder = JobRecorder(self.driver, {"seed": "7"})
        service = CoordinatorService(self.driver, recorder=recorder)
        services = [(SERVICE_NAME, service.register)]
        self._server = await grpc_server.start("127.0.0.1", self._ports[0], services, MAX_REQUEST_BYTES)
        self.page = serve_page("127.0.0.1", self._ports[1], recorder, self._security)
        self.driver.start()
        self._recording = asyncio.create_task(recorder.run())
        self.address = self._server.address

    def stop(self) -> None:
        if self.page is not None:
            self.page.close()
            self.page = None
            self._loop.run(self._stop())

    async def _stop(self) -> None:
        assert self.driver is not None
        assert self._server is not None
        assert self._recording is not None
        self._recording.cancel()
        await self.driver.close()
        await self._server.stop(0)

    def join(self, role: Role, index: int) -> Joined:
        with CoordinatorClient(self.address) as client:
            address = f"127.0.0.1:{7000 + index}" if role is Role.SHARD else ""
            return client.join(JoinRequest(role, index, address), f"{role.value} {index} {self.address}")

    def connect_and_vanish(self, joined: Joined) -> None:
        """The connection of this member begins and ends, as that of a process that is killed."""
        with CoordinatorClient(self.address) as client:
            stream = client.watch(member=joined.member)
            next(iter(stream))
            stream.cancel()

    def set_mode(self, consistency: Consistency) -> None:
        with CoordinatorClient(self.address) as client:
            client.set_consistency(consistency)

    def publish(self, name: str, step: int) -> None:
        """A version that no shard has: what the coordinator knows of it is shown."""

        async def publish() -> None:
            assert self.driver is not None
            made = self.driver._state.publications
            known = made.records.get(name)
            ask = PublishAsk(name, "model", step, "", 8, f"{name} {step}")
            made.commit(ask, known.newest + 1 if known else 1, (), 0.0, time.time())

        self._loop.run(publish())

    def follow(self, name: str, have: int, reader: str, *, leaves: bool = False) -> None:
        with CoordinatorClient(self.address) as client:
            client.follow_weights(FollowAsk(name, have, 0, reader, f"host-{reader}", 7, leaves=leaves), 0.0, 60.0)

    def beat(self, joined: Joined, **stats: Any) -> None:
        with CoordinatorClient(self.address) as client:
            client.heartbeat(joined.member, MemberStats(**stats))


@contextmanager
def running_page(security: Security | None = None, **settings: Any) -> Iterator[PagedCoordinator]:
    with LoopThread() as loop:
        coordinator = PagedCoordinator(loop, security or Security.off(), **settings)
        coordinator.start()
        try:
            yield coordinator
        finally:
            coordinator.stop()
