"""The virtual workers of a rehearsal: a thread each for the user's script, and a session that passes the turn."""

from __future__ import annotations

import importlib.util
import math
import os
import random
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.exchange import ExchangeKey, ExchangeState
from ps_protocol.cluster.leases import LeaseAnswer
from ps_protocol.cluster.model_status import ModelStatus
from ps_protocol.cluster.view import ClosedModelAsk, ClusterView, Member, Role
from ps_protocol.errors import (
    ConfigError,
    InternalError,
    ModelReleased,
    NonFiniteGradient,
    NotReady,
    PsError,
    UnknownModel,
)
from ps_protocol.launch.rehearsal import RehearsalNews, RehearsalPlan, Speeds
from ps_protocol.model.spec import Mode, ModelSpec, ShardMap
from ps_protocol.security.settings import SecuritySettings
from ps_worker.cluster import Cluster
from ps_worker.data.leased_loader import LeaseFeed
from ps_worker.deadlock_avoidance import is_needed, worker_clocks
from ps_worker.embedded import EmbeddedCluster
from ps_worker.optimizer import PsOptimizer
from ps_worker.rehearsal.turns import Place, Turns, TurnState
from ps_worker.session.config import WorkerConfig
from ps_worker.session.reporting import Progress
from ps_worker.session.session import Session
from ps_worker.session.uncaught import shown
from ps_worker.step.overlap import Overlap
from ps_worker.step.remote_model import RemoteModel
from ps_worker.step.shard_calls import ShardClient
from ps_worker.step.summary import StepSummary
from ps_worker.tables.prefetch import BatchIds, Prefetch
from ps_worker.transport.base import Peer

T = TypeVar("T")

LONG_SECONDS = 86400.0
"""Members of a rehearsal wait so long for each other, in real time: while one computes, all others stand still."""

_NEWS_SECONDS = 0.2
_POLL_SECONDS = 0.001
_COMING_SECONDS = 60.0
_COPIES = 3
"""A worker holds parameters, gradients and activations: about so many times its parameters."""

_TRAINERS = ("ps_worker.huggingface", "ps_worker.lightning", "ps_worker.ray")

_really_sleep = time.sleep


def _connecting_trainer() -> str | None:
    """Which of the trainers is calling, if one is: a script may import them and connect itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if trainer := next((name for name in _TRAINERS if module == name or module.startswith(f"{name}.")), None):
            return trainer
        frame = frame.f_back
    return None


class LimitReached(SystemExit):
    """Raised in a worker that has made as many steps as it is to make."""

    def __init__(self) -> None:
        super().__init__(0)


class RehearsalStage:
    """What the workers of one rehearsal share. Used by the worker that has the turn, and by the main thread."""

    def __init__(
        self, plan: RehearsalPlan, coordinator: str, speeds: Speeds, tell: Callable[[RehearsalNews], None]
    ) -> None:
        """``tell`` is called with news now and then, in any thread. Raises ConfigError when there is no such script."""
        self.plan, self.coordinator, self.speeds = plan, coordinator, speeds
        self._tell = tell
        self._told = 0.0
        self.code, self.path = _code_of(plan)
        self.folder = Path(self.path).parent if not plan.module else Path.cwd()
        self.result = RehearsalNews()
        self.staleness: Counter[int] = Counter()
        #: Sessions of live workers, by rank, in the order in which they joined.
        self.sessions: dict[int, RehearsedSession] = {}
        #: Workers that have called ``connect``.
        self.joined: set[int] = set()
        #: Names of models that are declared.
        self.models: set[str] = set()
        #: By ``id`` of a trained parameter: itself, and its worker.
        self._owners: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        #: Modules that are of no worker alone.
        self._common = set(sys.modules)
        waits = plan.settings["mode"] != Mode.ASYNC.value
        self.turns = Turns(plan.workers, self._held_back if waits else None)
        self.workers = [VirtualWorker(self, place) for place in self.turns.places]

    def run(self) -> RehearsalNews:
        """Run the script in all workers, and return what came of it."""
        for worker in self.workers:
            worker.start()
        try:
            self.turns.run()
        except PsError as error:
            self.turns.stop()
            self.fail(str(error))
        self.result.seconds = self.turns.now
        self.result.steps = sum(worker.steps for worker in self.workers)
        self.result.staleness = dict(sorted(self.staleness.items()))
        self.result.finished = True
        return self.result

    @property
    def all_ended(self) -> bool:
        """Whether no worker would go on."""
        return all(worker.place.state is TurnState.ENDED for worker in self.workers)

    def fail(self, text: str, trace: str = "") -> None:
        """Note why it failed: the first reason counts."""
        if not self.result.failure:
            self.result.failure, self.result.traceback = text, trace

    def note(self, text: str) -> None:
        """Tell the user something, once."""
        if text not in self.result.notes:
            self.result.notes.append(text)

    def goes_on(self) -> None:
        """A step begins."""
        if (now := time.monotonic()) - self._told > _NEWS_SECONDS:
            self._told = now
            self._tell(RehearsalNews(sum(worker.steps for worker in self.workers), self.turns.now))

    def begins_step(self, optimizer: torch.optim.Optimizer, arguments: object, named: object) -> None:
        """A hook of torch, before each step of every optimizer."""
        if not isinstance(optimizer, PsOptimizer):
            return
        worker = current()
        if worker is None:
            error = ConfigError("a rehearsal cannot run a script that steps in another thread than its own")
            self.fail(str(error))
            self.turns.stop()
            raise error
        worker.begins_step(optimizer)

    def ended_step(self, optimizer: torch.optim.Optimizer, arguments: object, named: object) -> None:
        """A hook of torch, after each step of every optimizer."""
        if isinstance(optimizer, PsOptimizer) and (worker := current()) is not None:
            worker.completed += 1

    def reported(self, seconds: float, metrics: Mapping[str, float | torch.Tensor]) -> None:
        """A worker has called ``cluster.report``."""
        self.result.metrics = sorted({*self.result.metrics, *metrics})
        if (value := metrics.get(self.plan.metric)) is not None:
            self.result.reports.append((seconds, float(value)))

    def owns(self, rank: int, optimizer: PsOptimizer) -> None:
        """Raises ConfigError where the parameters of ``optimizer`` are another worker's, too."""
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            known, owner = self._owners.setdefault(id(parameter), (weakref.ref(parameter), rank))
            if known() is parameter and owner != rank:
                raise ConfigError(
                    f"workers {owner} and {rank} of this rehearsal train the same model: they share what an imported "
                    "module holds",
                    remedy="make the model in the script, or in a function that it calls",
                )
            if known() is not parameter:
                self._owners[id(parameter)] = weakref.ref(parameter), rank

    def declared(self, shard_map: ShardMap) -> None:
        """A worker has declared a model."""
        if shard_map.spec.name in self.models:
            return
        self.models.add(shard_map.spec.name)
        size = sum(math.prod(variable.shape) for variable in shard_map.spec.variables) * 4
        needed, free = size * _COPIES * self.plan.workers, _free_bytes()
        if needed > free / 2:
            self.note(
                f"{self.plan.workers} workers with a model of {size / 2**30:.1f} GiB take about {needed / 2**30:.1f} "
                f"GiB here, of {free / 2**30:.1f} GiB that are free"
            )

    def statuses(self) -> Iterator[ModelStatus]:
        """Where each model stands on the shard; none while nobody is connected. Raises PsError."""
        for name in sorted(self.models):
            session = next(iter(self.sessions.values()), None)
            if session is None:
                return
            with suppress(UnknownModel, ModelReleased, NotReady):
                peer = Peer(0, session.shard_address(0))
                yield ShardClient(session.shard_channel(0), peer, name, epoch=0).status()

    def await_shard(self, came: Callable[[ModelStatus], bool]) -> None:
        """Return when the shard has come to something that was sent to it, for all models. Raises PsError."""
        deadline = time.monotonic() + _COMING_SECONDS
        while not all(map(came, self.statuses())):
            if time.monotonic() > deadline:
                raise InternalError("the shard of a rehearsal does not know what its coordinator or a worker sent")
            _really_sleep(_POLL_SECONDS)

    def await_leaving(self, rank: int) -> None:
        """Return when the shard and the other workers know that worker ``rank`` has left. Raises PsError."""
        for session in self.sessions.values():
            session.await_view(lambda view: rank not in view.live(Role.WORKER))
        self.await_shard(lambda status: all(clock.rank != rank for clock in status.clocks))

    def is_script(self, file: str) -> bool:
        """Whether ``file`` is of the user's own code."""
        path = Path(file)
        return self.folder in path.parents and "site-packages" not in path.parts

    def own_modules(self) -> dict[str, ModuleType]:
        """Modules of the user's own code that are loaded."""
        found = {}
        for name in sys.modules.keys() - self._common:
            module = sys.modules[name]
            file = getattr(module, "__file__", None)
            if file and self.is_script(file) and name.partition(".")[0] not in ("ps_worker", "ps_protocol"):
                found[name] = module
            elif file:
                self._common.add(name)
        return found

    def _held_back(self) -> int:
        return sum(status.parked_pulls for status in self.statuses())


_of_thread = threading.local()


def current() -> VirtualWorker | None:
    """The virtual worker whose script runs in this thread."""
    return getattr(_of_thread, "worker", None)


class VirtualWorker:
    """One run of the script, in a thread of its own. What processes have of their own is saved when it passes its turn.

    Its modules, ``sys.argv``, ``PS_RANK`` and the random number generators of torch, numpy and Python.
    """

    def __init__(self, stage: RehearsalStage, place: Place) -> None:
        self.stage, self.place = stage, place
        self.rank = place.rank
        #: Steps begun, and steps that have returned.
        self.steps = self.completed = 0
        #: What it waits for.
        self._hint = ""
        self._hinted = 0
        #: Its connection; None before.
        self.cluster: RehearsedCluster | None = None
        self._optimizers: weakref.WeakSet[PsOptimizer] = weakref.WeakSet()
        self._pushes = False
        self._main = ModuleType("__main__")
        self._main.__file__ = stage.path
        self._modules: dict[str, ModuleType] = {}
        plan = stage.plan
        self._argv = [stage.path if plan.module else plan.script, *plan.arguments]
        numbers = np.random.RandomState((plan.seed, self.rank))
        self._torch = torch.Generator().manual_seed(int(numbers.randint(1 << 31))).get_state()
        self._random = random.Random(int(numbers.randint(1 << 31))).getstate()
        self._numpy: Any = numbers.get_state()
        self._cuda: list[torch.Tensor] | None = None

    def start(self) -> None:
        """Begin; the script runs when its turn comes."""
        threading.Thread(target=self._run, name=f"worker {self.rank}", daemon=True).start()

    # -- the turn

    def ask_later(self, reason: str) -> None:
        """Pass the turn, and go on when another worker has done something."""
        reason = self._hint or reason
        self.forget_hint()
        self._pass(lambda: self.place.ask_later(reason))

    def note(self, text: str) -> None:
        """See RehearsalStage."""
        self.stage.note(text)

    def hint(self, text: str) -> None:
        """What it is about to wait for."""
        self._hint = text
        self._hinted += 1
        if self._hinted > 1 and self.place.state is TurnState.RUNS:
            raise InternalError(f"a rehearsal does not know how a worker waits: {text}")

    def forget_hint(self) -> None:
        """It waits for nothing."""
        self._hint, self._hinted = "", 0

    def changed(self) -> None:
        """It has done something that others may wait for."""
        self.place.changed = True

    def begins_step(self, optimizer: PsOptimizer) -> None:
        """Its gradients are computed: go on when they would be. Raises LimitReached, ConfigError."""
        limit = self.stage.plan.steps
        if limit is not None and self.completed >= limit:
            raise LimitReached
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self.stage.owns(self.rank, optimizer)
        self.steps += 1
        self.forget_hint()
        due = self.place.seconds + self.stage.speeds(self.rank, self.steps)
        self._pass(lambda: self.place.wait_until(due, f"its step {self.steps}"))
        self._pushes = True
        self.stage.goes_on()

    def pushed(self, staleness: int) -> None:
        """A push was answered."""
        self.stage.staleness[staleness] += self._pushes
        self._pushes = False

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around an exchange with the shard."""
        self._save()
        self.forget_hint()
        self.place.begin_exchange(f"the answer to its step {self.steps}")
        try:
            yield
        finally:
            self.place.end_exchange()
            self.forget_hint()
            self._restore()

    def _pass(self, passing: Callable[[], None]) -> None:
        self._save()
        passing()
        self._restore()

    def _save(self) -> None:
        self._modules = self.stage.own_modules()
        for name in self._modules:
            del sys.modules[name]
        self._argv = sys.argv
        self._torch, self._random, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def _restore(self) -> None:
        sys.modules.update(self._modules)
        sys.modules["__main__"] = self._main
        sys.argv = self._argv
        os.environ["PS_RANK"] = str(self.rank)
        torch.set_rng_state(self._torch)
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)

    # -- the script

    def _run(self) -> None:
        _of_thread.worker = self
        self.place.wait_until(0.0, "its first turn")
        self._restore()
        try:
            exec(self.stage.code, self._main.__dict__)
            self._ended()
        except SystemExit as ending:
            if ending.code not in (None, 0) and not isinstance(ending, LimitReached):
                code = f"exit code {ending.code}" if isinstance(ending.code, int) else str(ending.code)
                self.stage.fail(f"worker {self.rank} ended after {_steps(self.completed)}: {code}")
            else:
                self._ended()
        except BaseException as error:  # noqa: BLE001  # it is shown to the user
            self._failed(error)
        self.place.end()

    def _ended(self) -> None:
        """Leave what the script has not left, as the end of a process does."""
        if self.rank not in self.stage.joined:
            self._fail(
                ConfigError(
                    "the script has ended without connect(): there is nothing to rehearse",
                    remedy="call ps_worker.connect() and cluster.optimizer(...) in it",
                )
            )
        elif self.cluster is not None:
            self.cluster.close()

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, NonFiniteGradient):
            self.stage.result.not_finite = True
        elif isinstance(error, ValueError) and "signal only works in main thread" in str(error):
            error.add_note("a rehearsal cannot run a script that handles signals: its workers are threads")
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame above
        if isinstance(error, PsError):
            text = shown(error, trace) if trace else ""
        else:
            text = "".join(traceback.format_exception(type(error), error, trace))
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        self.stage.fail(f"worker {self.rank}, step {self.completed + 1}: {type(error).__name__}: {error}{notes}", text)
        self.stage.turns.stop()


def _steps(count: int) -> str:
    return f"{count} step{'s' if count != 1 else ''}"


class _Reports(Progress):
    def __init__(self, member: Member, worker: VirtualWorker) -> None:
        super().__init__(member)
        self._worker = worker

    def report(self, metrics: Mapping[str, float | torch.Tensor]) -> None:
        super().report(metrics)
        self._worker.stage.reported(self._worker.place.seconds, metrics)


class RehearsedSession(Session):
    """The session of a virtual worker: where it waits for others, they have their turns."""

    takes_turns = True

    def __init__(self, config: WorkerConfig, client: CoordinatorClient, membership: Membership) -> None:
        super().__init__(config, client, membership)
        worker = current()
        assert worker is not None
        self._worker, self._stage = worker, worker.stage
        self.exchanging = worker.exchanging
        self.progress = _Reports(membership.member, worker)
        #: Models that it trains.
        self._trains: set[str] = set()

    @classmethod
    def join(cls, config: WorkerConfig) -> RehearsedSession:
        """As of every session, in the place of the virtual worker. Raises ConfigError for what has no place here."""
        worker = current()
        if worker is None:
            raise ConfigError("a rehearsal connects in the thread of its script alone")
        if config.role is not Role.WORKER:
            raise ConfigError("a rehearsal has workers alone", expected="role worker", actual=config.role.value)
        stage = worker.stage
        if config.coordinator != stage.coordinator or config.security != SecuritySettings():
            raise ConfigError(
                "a rehearsal has servers of its own, and the script names others in connect()",
                actual=config.coordinator,
                remedy="leave address and certificates to the environment",
            )
        if worker.rank in stage.joined:
            raise ConfigError(
                "a rehearsal connects once, and the script connects again", remedy="keep one connection to the end"
            )
        if trainer := _connecting_trainer():
            raise ConfigError(
                f"a rehearsal cannot run what {trainer} trains: its trainers keep state of their process",
                remedy="rehearse the optimizer and its learning rate in a loop of your own",
            )
        return super().join(
            replace(
                config,
                rank=worker.rank,
                reconnect_timeout_seconds=LONG_SECONDS,
                metrics_port=None,
                alive_file=None,
                per_host=False,  # a wait for others of the host would not give them their turns
            )
        )

    def _wait_until_started(self, deadline: float) -> None:
        stage, rank = self._stage, self._worker.rank
        stage.sessions[rank] = self
        stage.joined.add(rank)
        self._worker.changed()
        while others := set(range(stage.plan.workers)) - stage.joined:
            self._worker.ask_later(f"waiting for worker {min(others)} to call connect()")
        super()._wait_until_started(time.monotonic() + self.config.connect_timeout_seconds)
        self._worker.changed()

    def await_view(self, came: Callable[[ClusterView], bool]) -> None:
        """Return when the view of this worker is such. Raises NotReady."""
        self._membership.wait_for(came, self.config.connect_timeout_seconds)

    def leave(self, reason: str = "") -> None:
        """As of every session; returns when all others know."""
        super().leave(reason)
        if self._stage.sessions.pop(self.rank, None) is not None:
            self._stage.await_leaving(self.rank)
            self._worker.changed()

    def wait_hint(self, text: str) -> None:
        """Note for what the worker is about to wait."""
        self._worker.hint(text)

    def _pause(self, seconds: float) -> None:
        self._worker.ask_later("waiting for others")

    def declare(self, spec: ModelSpec) -> ShardMap:
        """As of every session."""
        shard_map = super().declare(spec)
        self._trains.add(spec.name)
        self._stage.declared(shard_map)
        self._worker.changed()
        return shard_map

    def close_model(self, ask: ClosedModelAsk) -> None:
        """As of every session."""
        self._trains.discard(ask.model)
        super().close_model(ask)
        self._worker.changed()

    def pass_barrier(self, announce: Callable[[], None]) -> None:
        """As of every session."""
        member, phase, arrived = self._membership.member, self.phase, False
        while True:
            self.check()
            announce()
            if not arrived:
                arrived = True
                self._stage.await_shard(lambda status: self._is_beyond(status, phase))
                self._worker.changed()
            reply = self._persist(lambda left: self._client.barrier(member, phase, 0.0, left))
            if reply.released:
                break
            self._worker.ask_later("waiting at the barrier for worker " + ", ".join(map(str, reply.missing_ranks)))
        self.phase += 1
        self._worker.changed()

    def _is_beyond(self, status: ModelStatus, phase: int) -> bool:
        return all(clock.phase > phase for clock in status.clocks if clock.rank == self.rank)

    def exchange(self, key: ExchangeKey, payload: bytes, wait_seconds: float) -> ExchangeState:
        """As of every session."""
        self._worker.forget_hint()
        state = super().exchange(key, payload, 0.0)
        if wait_seconds and not state.complete:
            self._worker.ask_later(f"waiting in the exchange {key} for worker " + ", ".join(map(str, state.missing)))
            state = super().exchange(key, payload, 0.0)
        if state.complete:
            self._worker.changed()
        return state

    def record_step(self, samples: int | None, staleness: int, bytes: int, clock: int = 0) -> None:
        """As of every session."""
        super().record_step(samples, staleness, bytes, clock)
        if samples is None:
            self._worker.pushed(staleness)


class RehearsedCluster(Cluster):
    """The connection of a virtual worker."""

    def __init__(self, session: Session, embedded: EmbeddedCluster | None = None, name: str | None = None) -> None:
        super().__init__(session, embedded, name)
        worker = current()
        assert worker is not None
        self._worker = worker
        worker.cluster = self

    def set_mode(self, *arguments: Any, **named: Any) -> None:
        """Raises ConfigError."""
        raise ConfigError("a rehearsal sets the mode itself", remedy="leave set_mode() out; --mode names it")

    def scale(self, *arguments: Any, **named: Any) -> str:
        """Raises ConfigError."""
        raise ConfigError("a rehearsal has the workers that it began with", remedy="leave scale() out")

    def publish(self, *arguments: Any, **named: Any) -> int:
        """Publishes nothing: a rehearsal has no readers."""
        self._worker.note("publish publishes nothing here")
        return 0

    def follow(self, *arguments: Any, **named: Any) -> Iterator[int]:
        """Raises ConfigError."""
        raise ConfigError("a rehearsal cannot follow a model: that waits on real time", remedy="leave follow() out")

    def prefetch(self, loader: Iterable[T], ids_of: Callable[[T], BatchIds]) -> Prefetch[T]:
        """As of every cluster, without looking ahead: when rows come that nobody waits for is not known."""
        if self._session.lookahead:
            self._worker.note("prefetch looks no batch ahead here: rows have one update more than in a job")
        return Prefetch(loader, ids_of, self._models.table_modules, lambda: 0)

    def no_op_steps(self) -> list[RemoteModel]:
        """Make the no-op steps that other workers wait for; the models that made one."""
        session = self._session
        if not session.consistency.mode.bounded:
            return []
        needed = [
            model
            for model in self._models
            if is_needed(session.rank, worker_clocks(session, model), session.consistency, by_older=False)
        ]
        for model in needed:
            model.no_op_step()
        return needed


class TurnOverlap(Overlap):
    """Exchanges at once, in the turn of the step. What comes is used a step later, as with every overlap.

    In ssp the step waits where a job would wait at its next one.
    """

    def begin(self, exchange: Callable[[], StepSummary]) -> None:
        """As of every overlap."""
        worker = current()
        assert worker is not None
        self._under_way = done = Future[StepSummary]()
        try:
            with worker.exchanging():
                done.set_result(exchange())
        except PsError as error:
            done.set_exception(error)


class TurnFeed(LeaseFeed):
    """Leases of a virtual worker, of one batch each, asked for in its own turns; none is fetched ahead."""

    def _start(self) -> None:
        pass

    def take(self) -> Any:
        """As of every feed."""
        if not self._ready and not self._ended:
            self._ask_now()
        return super().take()

    def wait(self, seconds: float) -> bool:
        """As of every feed, however long it takes: others have their turns meanwhile.

        In bounded modes it makes the no-op steps that they wait for.
        """
        worker = current()
        assert worker is not None
        advanced: set[RemoteModel] = set()
        self._dry = True
        while True:
            if not self._ready and not self._ended:
                self._ask_now()
            if self._ready or self._ended:
                break
            if worker.cluster is not None:
                advanced.update(worker.cluster.no_op_steps())
            worker.ask_later("waiting for items that worker " + ", ".join(map(str, self.holders)) + " has")
        worker.changed()
        for model in advanced:
            model.catch_up()
        self._raise_error()
        return True

    def _ask_now(self) -> None:
        self._unanswered = next(self._sequences)
        # A batch at a time: the coordinator sizes leases by the real time that workers take.
        items = self._ask.batch_items or self._ask.lease_items
        ask = replace(self._request(self._unanswered, items), batch_items=0)
        try:
            answer = self._call(ask, 0.0, LONG_SECONDS)
        except PsError as error:
            self._error = error
            answer = LeaseAnswer(epoch=self.lease_epoch)
        self._take_in(ask, answer, None)
        if ask.trained and (worker := current()) is not None:
            worker.changed()


def _code_of(plan: RehearsalPlan) -> tuple[CodeType, str]:
    """The script, compiled, and its path. Raises ConfigError, SyntaxError."""
    if not plan.module:
        path = Path(plan.script).absolute()
        try:
            return compile(path.read_bytes(), str(path), "exec"), str(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    spec = importlib.util.find_spec(plan.script)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{plan.script}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise ConfigError(f"no module named '{plan.script}' that could be run")
    return code, spec.origin or plan.script


def _free_bytes() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024.0
    return math.inf
