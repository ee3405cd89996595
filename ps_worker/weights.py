"""Published weights for readers: ``subscribe`` yields whole versions, which are put into a module at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.errors import ConfigError, DamagedData, InvalidRequest, ModelMismatch
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
        """Return all parameters and buffers by name, on the CPU. They are not to be written to."""
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

        Raises:
            ModelMismatch: It is another model; the message names each difference, and nothing was changed.
        """
        source = plain_module(model) if isinstance(model, torch.nn.Module) else model
        module = source if isinstance(source, torch.nn.Module) else None
        own = bind(read_groups(source, may_be_empty=True), module)
        targets = dict(zip((v.name for v in own.variables), (*own.parameters, *own.buffer_values()), strict=True))
        self._check(targets, has_buffers=module is not None)
        with torch.no_grad():
            for name, value in self.tensors().items():
                if name in targets:
                    target, bits = targets[name].detach(), _BITS.get(value.element_size())
                    if bits is None:
                        target.copy_(value)
                    else:
                        target.view(bits).copy_(value.view(bits))

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
    """The versions of one name, newest first come: what ``subscribe`` returns. Used from one thread.

    Versions between the one that the reader has and the newest are skipped. The iteration ends when the job is
    finished, or with the newest version where ``follow`` is False.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Version:
        if self._closed:
            raise StopIteration
        if (first := self._first) is not None:
            self._first = None
            return first
        try:
            whole = self._reader.next()
        except InvalidRequest as error:
            if not self._has_cached:
                raise
            log.warning("waiting", "the cache is of another job, and is not used any more: %s", error)
            self._has_cached = False
            self._reader.forget()
            whole = self._reader.next()
        if whole is None:
            self.close()
            raise StopIteration
        return self._keep(whole)

    def fetch(self, number: int) -> Version:
        """Return one version, which need not be the newest; the iteration goes on above it.

        Args:
            number: Its number.

        Raises:
            VersionGone: It was removed, or a part of it is lost.
            InvalidRequest: There has been no such version.
            Unavailable: Coordinator or shards did not answer in time.
        """
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

    def close(self) -> None:
        """End. Safe to repeat."""
        if not self._closed:
            self._closed = True
            self._reader.close()
            self._client.close()

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
            and receives only what has changed since. Each job has a folder of its own; a version that is newer than
            those of the job is dropped, with a warning, where the job says so.
        follow: Wait for newer versions. False: end after the newest.
        reconnect_timeout_seconds: How long to wait for shards and a coordinator that do not answer. None:
            ``PS_RECONNECT_TIMEOUT``, else 60 s.
        security: TLS and tokens. None: from the environment.

    Returns:
        An iterator of versions, which may be used as a context.

    Raises:
        InvalidRequest: The job has never had version ``have``, or shards do not convert to ``dtype``.
        Unavailable: Coordinator or shards did not answer in time.
        DamagedData: A version that was received whole is not as it was committed.
    """
    if have is not None and have < 0:
        raise InvalidRequest("a version has a number from 1", expected="have=None for none", actual=str(have))
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
    bulk = config.transport != "grpc"
    what = Reading(name, _dtype(dtype), config.reconnect_timeout_seconds, follow, bulk)
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
    if found is None or not dtype.is_floating_point:
        raise ConfigError(
            "weights are not converted to this dtype", expected="float32, float64, float16, bfloat16", actual=name
        )
    return found


def _cached(folder: Path, name: str, dtype: torch.dtype | None) -> WholeVersion | None:
    """The version in the cache; a file that is damaged, or of another dtype, counts as none."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        kept = WholeVersion.load(folder / f"{name}.{_CACHE_FILE}")
    except DamagedData as error:
        log.warning("waiting", "the cache of '%s' is not used: %s", name, error)
        return None
    wanted = "" if dtype is None else str(dtype).removeprefix("torch.")
    return kept if kept is not None and kept.dtype == wanted else None
