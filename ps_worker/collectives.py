"""Collective calls of workers on small tensors and values, which the coordinator carries."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from google.protobuf.message import DecodeError

from ps_protocol.cluster.exchange import MAX_PAYLOAD_BYTES, ExchangeKey, ExchangeState, ExchangeValue, TensorBytes
from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError, InvalidRequest, PsError
from ps_protocol.model.spec import DType
from ps_protocol.wire.convert.exchange import exchange_value_from_bytes, exchange_value_to_bytes
from ps_worker import times
from ps_worker.deadlock_avoidance import is_needed, worker_clocks
from ps_worker.host.messages import FOREVER
from ps_worker.session.reporting import log
from ps_worker.session.session import Session
from ps_worker.step.remote_model import RemoteModel

_REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "mean": lambda stacked: stacked.mean(0),
        "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
        "min": lambda stacked: stacked.amin(0),
        "max": lambda stacked: stacked.amax(0),
    }
)

_SECTION_BITS = 32


class Collectives:
    """The collective calls of one worker: see ``Cluster.gather_values``. Used from the training thread.

    All calls raise ConfigError for an evaluator; InvalidRequest for payloads that are too large, calls of other workers
    that do not match, and results that are not kept any more; Fenced, Unavailable.
    """

    def __init__(self, session: Session, models: Iterable[RemoteModel]) -> None:
        self._session = session
        self._trained = models
        self._ordinals: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)

    def all_gather(self, tensor: torch.Tensor, *, name: str = "default", section: int = 0) -> list[torch.Tensor]:
        """See ``Cluster.all_gather``."""
        _check_tensor(tensor, "all_gather")
        return [each.to(tensor.device) for each in self._tensors("all_gather", tensor, name, section).values()]

    def all_reduce(
        self, tensor: torch.Tensor, reduction: str = "mean", *, name: str = "default", section: int = 0
    ) -> torch.Tensor:
        """See ``Cluster.all_reduce``."""
        _check_tensor(tensor, "all_reduce")
        if reduction not in _REDUCTIONS:
            raise ConfigError(
                "unknown reduction", expected=", ".join(_REDUCTIONS), actual=repr(reduction), remedy="name one of these"
            )
        if reduction == "mean" and not tensor.is_floating_point():
            raise ConfigError(
                "all_reduce() cannot make the mean of integers",
                expected="a floating-point tensor",
                actual=str(tensor.dtype),
                remedy="give tensor.float(), or reduce with 'sum'",
            )
        parts = self._tensors(f"all_reduce {reduction}", tensor, name, section)
        for rank, part in parts.items():
            if (part.shape, part.dtype) != (tensor.shape, tensor.dtype):
                raise InvalidRequest(
                    "all_reduce() of tensors that differ between workers",
                    expected=f"{tuple(tensor.shape)} of {tensor.dtype}, as this worker's",
                    actual=f"{tuple(part.shape)} of {part.dtype} from worker {rank}",
                    remedy="reduce, or log in a trainer, the same values on every worker",
                )
        return _REDUCTIONS[reduction](torch.stack(list(parts.values()))).to(tensor.device)

    def broadcast(self, value: Any, source: int = 0, *, name: str = "default") -> Any:
        """See ``Cluster.broadcast``."""
        sent = encode_value("broadcast", value) if self._session.rank == source else encode_value("broadcast", None)
        payloads = self._exchange(sent, name)
        if source not in payloads:
            raise InvalidRequest(
                f"worker {source} did not take part in broadcast()",
                expected=f"worker {source} among those that called it",
                actual="worker " + ", ".join(map(str, payloads)),
                remedy="name a source that lives, or begin again with all workers",
            )
        return decode_value(payloads[source], "broadcast", source)

    def gather_values(self, value: Any, *, name: str = "default", section: int = 0) -> dict[int, Any]:
        """See ``Cluster.gather_values``."""
        return self._gather("gather_values", value, name, section)

    def _gather(self, call: str, value: Any, name: str, section: int = 0) -> dict[int, Any]:
        payloads = self._exchange(encode_value(call, value), name, section)
        return {rank: decode_value(payload, call, rank) for rank, payload in payloads.items()}

    def _tensors(self, call: str, tensor: torch.Tensor, name: str, section: int) -> dict[int, torch.Tensor]:
        payloads = self._exchange(encode_value(call, tensor), name, section)
        return {rank: decode_tensor(payload, call, rank) for rank, payload in payloads.items()}

    def _exchange(self, payload: bytes, name: str, section: int = 0) -> Mapping[int, bytes]:
        if self._session.config.role is not Role.WORKER:
            raise ConfigError(
                "an evaluator made a collective call",
                expected="worker",
                actual=self._session.config.role.value,
                remedy="leave it out: workers do not wait for evaluators",
            )
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise InvalidRequest(
                "the value for a collective call is too large",
                expected=f"at most {MAX_PAYLOAD_BYTES} bytes",
                actual=f"{len(payload)} bytes",
                remedy="reduce it before, or write it to storage that all workers read",
            )
        ordinal = (section << _SECTION_BITS) + next(self._ordinals[name, section])
        began = time.perf_counter()
        payloads = wait_for_exchange(self._session, self._trained, ExchangeKey(name, ordinal), payload).payloads
        nbytes = len(payload) + sum(map(len, payloads.values()))
        self._session.counters.exchanged(time.perf_counter() - began, nbytes)
        return payloads


def _check_tensor(value: object, call: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{call}() needs a tensor", actual=repr(value)[:80], remedy="torch.tensor(…) makes one")


_DTYPES = {getattr(torch, dtype.value): dtype for dtype in DType}


def encode_value(call: str, value: Any) -> bytes:
    """Return the payload of ``value`` for ``call``. Raises ConfigError for what is neither a dense tensor nor JSON."""
    if isinstance(value, torch.Tensor):
        return exchange_value_to_bytes(ExchangeValue(call, tensor=_bytes_of(value)))
    _check_json(value, call)
    return exchange_value_to_bytes(ExchangeValue(call, json.dumps(value)))


def decode_value(payload: bytes, call: str, rank: int) -> Any:
    """Return the value of worker ``rank``; tensors are on the CPU.

    Raises InvalidRequest when that worker made another call, or its payload is no value.
    """
    try:
        value = exchange_value_from_bytes(payload)
        if value.call != call:
            raise InvalidRequest(
                "workers make different collective calls at the same place of their scripts",
                expected=f"{call}, as this worker",
                actual=f"{value.call[:80]} by worker {rank}",
                remedy="have every worker make the same collective calls in the same order, or give them names",
            )
        return json.loads(value.json) if value.tensor is None else _tensor_of(value.tensor)
    except (DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"worker {rank} gave no value to {call}", actual=repr(error)[:200]) from error


def decode_tensor(payload: bytes, call: str, rank: int) -> torch.Tensor:
    """As ``decode_value``, which also raises InvalidRequest for what is no tensor."""
    value = decode_value(payload, call, rank)
    if not isinstance(value, torch.Tensor):
        raise InvalidRequest(f"worker {rank} gave no tensor to {call}", actual=repr(value)[:80])
    return value


def _bytes_of(tensor: torch.Tensor) -> TensorBytes:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise ConfigError(
            "workers cannot exchange this tensor",
            expected="a dense tensor of " + ", ".join(each.value for each in DType),
            actual=f"{tensor.dtype}, {tensor.layout}",
        )
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return TensorBytes(dtype, tuple(tensor.shape), plain.numpy().tobytes())


def _tensor_of(tensor: TensorBytes) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype.value)
    if not tensor.elements:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.elements), dtype=dtype).reshape(tensor.shape)


def _check_json(value: Any, call: str) -> None:
    """Raises ConfigError unless ``value`` comes back from JSON as it was."""
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list:
        for each in value:
            _check_json(each, call)
    elif type(value) is dict and all(type(key) is str for key in value):
        for each in value.values():
            _check_json(each, call)
    else:
        raise ConfigError(
            f"{call} cannot send this value",
            expected="a tensor, or what JSON has: None, bool, int, float, str, lists, and dicts with keys of str",
            actual=repr(value)[:80],
            remedy="send its parts as such values",
        )


def wait_for_exchange(
    session: Session, models: Iterable[RemoteModel], key: ExchangeKey, payload: bytes
) -> ExchangeState:
    """Send ``payload``, and wait until the exchange is complete. Called by the training thread. Raises PsError.

    In bounded modes, a worker that has more steps to make before the exchange may wait in a step for this worker. Then
    this one makes a no-op step of that model, and pulls the newest parameters at the end. It makes none for a worker
    that is ahead because it has left the exchange: it reads the clocks first, and the exchange must be incomplete after
    that.
    """
    advanced: dict[str, RemoteModel] = {}
    wait_seconds, is_away = 0.5, False
    while not (state := session.exchange(key, payload, wait_seconds)).complete:
        session.check()
        if not is_away:
            is_away = True
            for model in models:
                model.pipeline.away(FOREVER)
        session.wait_hint(f"waiting in the exchange {key} for worker " + ", ".join(map(str, state.missing)))
        wait_seconds = 0.5
        if (needed := list(_needed(session, models))) and not session.exchange(key, payload, 0.0).complete:
            for model in needed:
                if model.name not in advanced:
                    model.begin_waiting()
                model.no_op_step()
                advanced[model.name] = model
            wait_seconds = times.NO_OP_AGAIN_SECONDS
    for model in advanced.values():
        model.catch_up()
    for model in models if is_away else ():
        model.pipeline.is_back()
    return state


def _needed(session: Session, models: Iterable[RemoteModel]) -> Iterator[RemoteModel]:
    """The models in which another worker is further than it may be without a step of this one."""
    consistency = session.consistency
    if not consistency.mode.bounded:
        return
    for model in models:
        try:
            if is_needed(session.rank, worker_clocks(session, model), consistency, by_older=False):
                yield model
        except PsError as error:
            log.debug("the clocks of other workers are not known: %s", error)
