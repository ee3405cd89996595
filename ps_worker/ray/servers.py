"""The server actors of one job: started, watched, and started again where they are lost."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ps_protocol import times
from ps_protocol.client.worker_requests import LostServer, Wanted, WorkerRequests
from ps_protocol.errors import PsError, StateLost, Unavailable
from ps_protocol.launch.restarts import Restarts
from ps_protocol.logs import EventLogger
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_worker.ray.actors import SERVER_CALLS, ServerActor
from ps_worker.ray.placement import Reservation
from ps_worker.ray.plan import RayPlan, ServerKind, ServerName

log = EventLogger("ps_worker")

_COORDINATOR = ServerName(ServerKind.COORDINATOR)


class RayActors(ABC):
    """The actors of one kind, by name: those that are lost are started again, when they are due. Used by one thread."""

    def __init__(self, restarts: int) -> None:
        self._restarts = Restarts(restarts)
        self._actors: dict[Any, Any] = {}
        #: Those that were killed because they hang, until they have ended.
        self._ending: set[Any] = set()
        #: Those that wait for their restart, and until when.
        self._due: dict[Any, float] = {}

    def actor(self, name: Any) -> Any:
        """The handle of the present actor of ``name``. Raises KeyError. Called by any thread."""
        return self._actors[name]

    @abstractmethod
    def _launch(self, name: Any) -> None:
        """Start an actor of ``name``, and call ``_launched``."""

    def _launched(self, name: Any, actor: Any) -> None:
        self._actors[name] = actor
        self._restarts.started(name, time.monotonic())

    def _starts_again(self, name: Any, how: str) -> bool:
        """End the actor of ``name``, which ended as ``how`` describes; whether it will be started again."""
        end_actor(self._actors.pop(name))
        pause_seconds = self._restarts.take(name, time.monotonic())
        if pause_seconds is None:
            return False
        log.warning(
            "ray.restart",
            "RayCluster: %s; starting it again in %g s (restart %d of %d)",
            how,
            pause_seconds,
            self._restarts.used,
            self._restarts.total,
        )
        self._due[name] = time.monotonic() + pause_seconds
        return True

    def _launch_due(self) -> None:
        now = time.monotonic()
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._launch(name)


class RayServers(RayActors):
    """Made, started and closed by the user's thread; from ``start`` to ``close`` a thread watches. ``failure`` and
    ``actor`` may be read by any thread.
    """

    def __init__(
        self,
        plan: RayPlan,
        reservation: Reservation,
        host: str,
        ask: Callable[[RayPlan, str], WorkerRequests | None] | None = None,
    ) -> None:
        """``host``: the address that all servers listen on; empty: that of their node. ``ask``: makes what asks the
        coordinator at an address for servers that it has lost; by default ``requests_of``.
        """
        super().__init__(plan.server_restarts)
        self._ask = ask or requests_of
        self._requests: WorkerRequests | None = None
        self._plan = plan
        self._reservation = reservation
        self._host = host
        self._bundles = {server: bundle for bundle, server in enumerate(plan.servers())}
        #: The call of each server that ends with it.
        self._serving: dict[Any, ServerName] = {}
        #: The call of each actor that returns the host and the number of its server's process.
        self._processes: dict[ServerName, Any] = {}
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher of Ray actors", daemon=True)
        #: host:port of the coordinator.
        self.address = ""
        #: Why the job cannot go on; None as long as it can.
        self.failure: PsError | None = None

    def start(self, timeout_seconds: float) -> None:
        """Return when all servers serve. Raises Unavailable, with the last lines of the server that does not."""
        deadline = time.monotonic() + timeout_seconds
        self._launch(_COORDINATOR)
        self.address = self._address(_COORDINATOR, deadline)
        members = [server for server in self._plan.servers() if server != _COORDINATOR]
        for server in members:
            self._launch(server)
        for server in members:
            if server.kind is not ServerKind.STANDBY:
                self._address(server, deadline)
        self._requests = self._ask(self._plan, self.address)
        self._watcher.start()

    def close(self) -> None:
        """Stop all servers, the coordinator last, and end their actors. Safe to repeat.

        A coordinator that has checkpoints written is stopped first: for the last one it needs the shards. Raises
        Unavailable where that one was not written.
        """
        self._closed.set()
        if self._watcher.is_alive():
            self._watcher.join()
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if not ray.is_initialized():
            return
        coordinator = [server for server in self._actors if server == _COORDINATOR]
        saves = any(option.partition("=")[0] == "--checkpoint-dir" for option in self._plan.coordinator_options)
        unsaved = self._stop(coordinator, times.LONG_PATIENCE_SECONDS) if saves else ""
        self._stop([server for server in self._actors if server != _COORDINATOR], times.PATIENCE_SECONDS)
        if not saves:
            self._stop(coordinator, times.PATIENCE_SECONDS)
        self._actors.clear()
        if unsaved:
            raise Unavailable("the last checkpoint was not written", actual=unsaved, remedy="correct what its log says")

    def _launch(self, server: ServerName) -> None:
        actor = (
            ray.remote(ServerActor)
            .options(max_concurrency=SERVER_CALLS, **self._reservation.options(self._bundles[server]))
            .remote(server, self._plan, self._host)
        )
        self._launched(server, actor)
        self._serving[actor.serve.remote(self.address)] = server
        self._processes[server] = actor.process.remote()

    def _address(self, server: ServerName, deadline: float) -> str:
        """Where it serves. Raises Unavailable."""
        left_seconds = max(1.0, deadline - time.monotonic())
        try:
            answer = self._actors[server].address.remote(left_seconds)
            return str(ray.get(answer, timeout=left_seconds + times.SHARD_CALL_SECONDS))
        except GetTimeoutError:
            raise Unavailable(
                f"Ray did not start the actor of {server} in time",
                remedy="see the log of Ray, or wait longer with RayCluster(start_timeout_seconds=…)",
            ) from None
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise Unavailable(f"the actor of {server} was lost at its start", actual=str(error)) from error

    def _watch(self) -> None:
        while not self._closed.is_set() and ray.is_initialized():
            ended, _ = ray.wait(list(self._serving), num_returns=1, timeout=0.2)
            for call in ended:
                self._on_end(call)
            self._end_hanging()
            self._launch_due()
            if self.failure is not None:
                return

    def _end_hanging(self) -> None:
        """Kill the actors of servers whose leases have ended while their processes live: they may be stopped."""
        wanted = self._requests.take() if self._requests is not None else Wanted()
        if wanted.error is not None:
            log.warning("ray.hanging", "RayCluster: processes that hang are not noticed: %s", wanted.error)
        for lost in wanted.lost:
            for server in (ServerName(kind, lost.index) for kind in (ServerKind.SHARD, ServerKind.STANDBY)):
                if server in self._ending or not self._is(server, lost):
                    continue
                self._ending.add(server)
                log.warning(
                    "ray.hanging",
                    "RayCluster: %s hangs: the coordinator has lost it, for %s; it is killed",
                    server,
                    lost.how,
                )
                end_actor(self._actors[server])

    def _is(self, server: ServerName, lost: LostServer) -> bool:
        """Whether ``lost`` is the process that the present actor of ``server`` has started."""
        answer = self._processes.get(server) if server in self._actors else None
        if answer is None or not ray.wait([answer], num_returns=1, timeout=0)[0]:
            return False
        with suppress(RayError):
            return bool(tuple(ray.get(answer)) == (lost.host, lost.pid))
        return False

    def _on_end(self, call: Any) -> None:
        server = self._serving.pop(call)
        if self._closed.is_set():
            return
        how = _how_it_ended(call, server)
        if server in self._ending:
            self._ending.discard(server)
            how = f"{server} hung and was killed"
        if not self._plan.keeps_state:
            end_actor(self._actors.pop(server))
            self.failure = StateLost(how, remedy="give RayCluster() a data_dir: servers then continue from it")
            return
        if not self._starts_again(server, how):
            self.failure = Unavailable(
                f"{how}; all {self._restarts.total} restarts of servers are used",
                remedy="see its log; RayCluster(server_restarts=…) allows more",
            )

    def _stop(self, servers: list[ServerName], seconds: float) -> str:
        """Stop ``servers`` and end their actors; the last lines of one that could not have a checkpoint written."""
        actors, unsaved = [self._actors[server] for server in servers], ""
        if stopping := [actor.stop.remote(seconds) for actor in actors]:
            ended, late = ray.wait(stopping, num_returns=len(stopping), timeout=seconds + times.SHARD_CALL_SECONDS)
            for call in ended:
                with suppress(RayError):
                    unsaved = ray.get(call) or unsaved
            if late and seconds == times.LONG_PATIENCE_SECONDS:
                unsaved = f"the coordinator has not ended within {seconds:.0f} s"
        for actor in actors:
            end_actor(actor)
        return unsaved


def requests_of(plan: RayPlan, address: str) -> WorkerRequests | None:
    """Asks the coordinator at ``address`` for what it has lost; None where this driver lacks the files for that."""
    try:
        return WorkerRequests(address, Security(plan.security, AccessRole.WORKER))
    except PsError as error:
        log.warning("ray.hanging", "RayCluster: processes that hang are not noticed: %s", error)
        return None


def end_actor(actor: Any) -> None:
    """End the process of an actor; what it runs is killed with it."""
    with suppress(RayError):
        ray.kill(actor)


def _how_it_ended(call: Any, server: ServerName) -> str:
    try:
        return str(ray.get(call))
    except RayTaskError as error:
        return f"{server} cannot be started: {error.cause}"
    except RayError as error:
        return f"the actor of {server} was lost ({type(error).__name__})"
