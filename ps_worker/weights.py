"""Published weights for readers: ``subscribe`` yields whole versions, which are put into a module at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.weights import check_name, number_of
from ps_protocol.errors import ConfigError, DamagedData, InvalidRequest, ModelMismatch, Retryable, UnknownVersion
from ps_protocol.feed.cursor import Cursor
from ps_protocol.model.spec import DType, Kind
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.weights.reader import Reading, VersionReader
from ps_protocol.weights.version import WholeVersion
from ps_worker.model.bindings import Source, bind, read_groups
from ps_worker.model.plain import plain_module
from ps_worker.session.config import WorkerConfig
from ps_worker.session.reporting import log

_CACHE_FILE = "version"

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size: values are copied as these, so that every bit of a NaN stays."""


class Version:
    """One whole version of published weights. It never changes.

    ``number`` rises by one from version to version; ``step`` and ``metadata`` are what the publisher gave.
    """

    def __init__(self, whole: WholeVersion) -> None:
        self._whole = whole

    def __repr__(self) -> str:
        return f"Version({self._whole.name} {self.number}, step {self.step})"

    @property
    def number(self) -> int:
        """Number of the version, from 1."""
        return self._whole.number

    @property
    def step(self) -> int:
        """The step that the publisher gave."""
        return self._whole.step

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that the publisher gave."""
        return self._whole.metadata

    @property
    def at_seconds(self) -> float:
        """Unix time at which it was committed."""
        return self._whole.at_seconds

    @property
    def tables(self) -> Mapping[str, Cursor]:
        """For each table of the model, where its feed stood: rows that were followed at least to there fit it."""
        return self._whole.tables

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers by name, on the CPU. They are not to be written to.

        A tensor that has several names in the model (tied weights) is there once, under the first of them.
        """
        tensors = {}
        for variable in self._whole.variables:
            dtype, data = getattr(torch, variable.dtype.value), self._whole.values[variable.name]
            flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
            tensors[variable.name] = flat.view(variable.shape)
        return tensors

    def apply_(self, model: Source) -> None:
        """Put the values into a module, or into parameters. Everything is compared before anything is written.

        Args:
            model: A module, or anything that a torch optimizer takes, of the names, shapes and dtypes of the version.
                Of a wrapper that puts its own name before them, such as AveragedModel, the ``module`` inside.

        Raises:
            ModelMismatch: It is another model; the message names each difference, and nothing was changed.
        """
        source = plain_module(model) if isinstance(model, torch.nn.Module) else model
        module = source if isinstance(source, torch.nn.Module) else None
        own = bind(read_groups(source, may_be_empty=True), module)
        targets = dict(zip((v.name for v in own.variables), (*own.parameters, *own.buffer_values()), strict=True))
        self._check(targets, has_buffers=module is not None)
        copied: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for name, value in self.tensors().items():
            if name in targets:
                target, bits = targets[name].detach(), _BITS.get(value.element_size())
                copied.append(target if bits is None else target.view(bits))
                values.append(value if bits is None else value.view(bits))
        if copied:
            # One call: Ctrl-C comes before or after it, and never leaves parts of two versions.
            torch._foreach_copy_(copied, values)

    def _check(self, targets: Mapping[str, torch.Tensor], *, has_buffers: bool) -> None:
        differences, known = [], set()
        for variable in self._whole.variables:
            known.add(variable.name)
            target = targets.get(variable.name)
            if target is None:
                if variable.kind is Kind.PARAMETER or has_buffers:
                    differences.append(f"'{variable.name}' is missing here")
                continue
            for what, theirs, mine in (
                ("shape", variable.shape, tuple(target.shape)),
                ("dtype", variable.dtype.value, str(target.dtype).removeprefix("torch.")),
            ):
                if theirs != mine:
                    differences.append(f"'{variable.name}' has {what} {mine} instead of {theirs}")
        # Buffers that workers keep for themselves are not published.
        published = {variable.kind for variable in self._whole.variables}
        if Kind.BUFFER in published or not has_buffers:
            differences += [f"'{name}' is not in the version" for name in targets if name not in known]
        else:
            differences += [
                f"'{name}' is not in the version"
                for name, target in targets.items()
                if name not in known and isinstance(target, torch.nn.Parameter)
            ]
        if differences:
            raise ModelMismatch(
                f"this model is not the one of which {self!r} was published: " + "; ".join(differences),
                remedy="build the same model as the publisher; subscribe(dtype=...) gives another dtype",
            )


class Subscription(Iterator[Version]):
    """The versions of one name, newest first come: what ``subscribe`` returns. Used from one thread; any may close it.

    Versions between the one that the reader has and the newest are skipped. The iteration ends when the job is
    finished, when it is closed, or after one version where ``follow`` is False.
    """

    def __init__(self, reader: VersionReader, client: CoordinatorClient, cache: Path | None, first: Version | None):
        self._reader = reader
        self._client = client
        self._cache = cache
        #: The version of the cache, which comes first.
        self._first = first
        #: Nothing was received yet: what the reader has, it has from the cache, which may be that of an earlier job.
        self._has_cached = first is not None
        self._closed = False
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Version:
        self._check_process()
        if self._closed:
            raise StopIteration
        if (first := self._first) is not None:
            self._first = None
            if self._is_of_job(first):
                return first
        try:
            whole = self._next()
        except (Retryable, ValueError):  # gRPC raises the latter for a channel that another thread closes
            if not self._closed:
                raise
            raise StopIteration from None
        if whole is None:
            self.close()
            raise StopIteration
        return self._keep(whole)

    def _next(self) -> WholeVersion | None:
        try:
            return self._reader.next()
        except UnknownVersion as error:
            if not self._has_cached:
                raise
            self._drop_cached(error)
            return self._reader.next()

    def fetch(self, number: int) -> Version:
        """Return one version, which need not be the newest; the iteration goes on above it.

        Args:
            number: Its number.

        Raises:
            VersionGone: It was removed, or a part of it is lost.
            UnknownVersion: There has been no such version.
            Unavailable: Coordinator or shards did not answer in time.
        """
        self._check_process()
        number = _number(number, 1)
        self._first = None
        return self._keep(self._reader.fetch(number))

    def restart(self) -> None:
        """Receive the next version whole, not as what changed since the last one."""
        self._reader.restart()

    @property
    def delta_bytes(self) -> int:
        """Bytes received as deltas so far."""
        return self._reader.received.delta_bytes

    @property
    def full_bytes(self) -> int:
        """Bytes received as whole pieces so far."""
        return self._reader.received.full_bytes

    @property
    def saved_bytes(self) -> int:
        """How many more bytes it would have received so far without deltas."""
        return self._reader.received.saved_bytes

    def close(self) -> None:
        """End. Safe to repeat."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._reader.close()
            self._client.close()

    def _check_process(self) -> None:
        """Raises InvalidRequest in a forked child: its connections are those of its parent, and do not answer."""
        if os.getpid() != self._pid:
            raise InvalidRequest(
                "a forked process cannot use the subscription of its parent",
                expected=f"process {self._pid}",
                actual=f"process {os.getpid()}",
                remedy="subscribe in the process that reads; start it with the method spawn",
            )

    def _is_of_job(self, cached: Version) -> bool:
        """Ask the coordinator; while it does not answer, the cached version counts as one of the job."""
        try:
            self._reader.check(times.BRIEF_CALL_SECONDS)
        except UnknownVersion as error:
            self._drop_cached(error)
            return False
        except Retryable as error:
            log.warning("waiting", "version %d is that of the cache: %s", cached.number, error)
        return True

    def _drop_cached(self, error: UnknownVersion) -> None:
        log.warning("waiting", "the cache is of another job, and is not used any more: %s", error)
        self._has_cached = False
        self._reader.forget()

    def _keep(self, whole: WholeVersion) -> Version:
        self._has_cached = False
        if self._cache is not None:
            try:
                whole.save(self._cache / f"{whole.name}.{_CACHE_FILE}")
            except OSError as error:
                # The version is whole in memory; the file has the one before.
                log.warning("waiting", "version %d of '%s' is not in the cache: %s", whole.number, whole.name, error)
        return Version(whole)


def subscribe(
    name: str,
    have: int | None = None,
    *,
    coordinator: str | None = None,
    dtype: torch.dtype | None = None,
    cache: str | os.PathLike[str] | None = None,
    follow: bool = True,
    reconnect_timeout_seconds: float | None = None,
    security: SecuritySettings | None = None,
) -> Subscription:
    """Follow the weights that a job publishes under a name: yield the newest version whenever there is a newer one.

    A reader is not a member of the job, and the job never waits for it; it needs the token of a reader. Each version is
    received beside the one before it, as what has changed since that where that is less, is checked, and is yielded
    whole. If nothing was published yet, the iterator waits.

    Args:
        name: The name that ``cluster.publish`` was given.
        have: Number of the version that the caller has: only newer ones are yielded. None: any.
        coordinator: Address of the coordinator, host:port. None: ``PS_COORDINATOR``.
        dtype: Floating-point values are converted to it by the shards, which send less. None: as they are.
        cache: Folder for the last version. A reader that is started again yields it first, unless ``have`` names it,
            also while the coordinator does not answer, and receives only what has changed since. A version of another
            job is dropped, with a warning.
        follow: Wait for newer versions. False: end after the one that is the newest now.
        reconnect_timeout_seconds: How long to wait for shards and a coordinator that do not answer. None:
            ``PS_RECONNECT_TIMEOUT``, else 60 s.
        security: TLS and tokens. None: from the environment.

    Returns:
        An iterator of versions, which may be used as a context.

    Raises:
        UnknownVersion: The job has never had version ``have``, or that of ``cache`` any more.
        InvalidRequest: It is no name, shards do not convert to ``dtype``, or a relay does not serve the name.
        ConfigError: ``dtype`` is no floating-point dtype, or ``cache`` no folder that can be made.
        Unavailable: Coordinator or shards did not answer in time.
        Unauthenticated: The coordinator does not know this process, or one of the two does not speak TLS.
        DamagedData: A version that was received whole is not as it was committed.
    """
    check_name(name)
    if have is not None:
        have = _number(have, 0)
    config = WorkerConfig.from_environment(
        os.environ,
        coordinator=coordinator,
        # Whatever this process is otherwise: it may run beside a server, with the TF_CONFIG of that.
        role="evaluator",
        reconnect_timeout_seconds=reconnect_timeout_seconds,
        security=security,
    )
    folder = None if cache is None else Path(cache)
    kept = None if folder is None else _cached(folder, name, dtype)
    if kept is not None and have is not None and kept.number != have:
        kept = None
    bulk, maps = config.transport != "grpc", config.transport in ("auto", "shm")
    what = Reading(name, _dtype(dtype), config.reconnect_timeout_seconds, follow, bulk, maps)
    client = CoordinatorClient(config.coordinator, Security(config.security, AccessRole.READER))
    reader = VersionReader(
        client, what, have=kept.number if kept else have or 0, base=kept, say=partial(log.warning, "waiting")
    )
    first = Version(kept) if kept is not None and have is None else None
    return Subscription(reader, client, folder, first)


def _dtype(dtype: torch.dtype | None) -> DType | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    found = next((each for each in DType if each.value == name), None)
    if found is None or not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            "weights are not converted to this dtype", expected="torch.float32, float64, float16, bfloat16", actual=name
        )
    return found


def _cached(folder: Path, name: str, dtype: torch.dtype | None) -> WholeVersion | None:
    """The version in the cache; a file that is damaged, of another name, or of another dtype, counts as none.

    Raises ConfigError where the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache {folder} is no folder, and cannot be made: {error.strerror}",
            remedy="give a folder that can be written",
        ) from error
    try:
        kept = WholeVersion.load(folder / f"{name}.{_CACHE_FILE}")
    except DamagedData as error:
        log.warning("waiting", "the cache of '%s' is not used: %s", name, error)
        return None
    wanted = "" if dtype is None else str(dtype).removeprefix("torch.")
    return kept if kept is not None and (kept.name, kept.dtype) == (name, wanted) else None


def _number(given: int, least: int) -> int:
    """Raises InvalidRequest."""
    number = number_of(given)
    if number is None or number < least:
        raise InvalidRequest(
            "versions have numbers from 1", expected="a whole number; have=None for none", actual=repr(given)[:100]
        )
    return number
