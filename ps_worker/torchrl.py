"""Weights of TorchRL's collectors from a job: the trainer publishes, and each collector follows as a reader.

Needs ``torch-ps[torchrl]``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrl.weight_update import WeightSyncScheme

from ps_protocol.errors import ConfigError, InvalidRequest, ModelMismatch, PsError
from ps_protocol.security.settings import SecuritySettings
from ps_worker.weights import Subscription, Version, subscribe

__all__ = ["PublishedWeightSyncScheme"]


class PublishedWeightSyncScheme(WeightSyncScheme):
    """Give it to a collector as ``weight_sync_schemes={"policy": scheme}``, in the process of the trainer.

    ``collector.update_policy_weights_()`` publishes a version and returns when readers get it. Each process that
    collects follows the name by itself: it takes the newest version between two calls of its policy, and so has one
    whole version in each call. Collectors elsewhere take ``weight_recv_schemes={"policy": scheme}``, with a scheme of
    their own, and need nothing but the coordinator's address.
    """

    def __init__(
        self,
        name: str = "policy",
        publish: Callable[[], int] | None = None,
        *,
        coordinator: str | None = None,
        dtype: torch.dtype | None = None,
        security: SecuritySettings | None = None,
    ) -> None:
        """Make a scheme.

        Args:
            name: The name under which versions are published.
            publish: Publishes a version and returns its number when it is committed, for example
                ``lambda: cluster.publish("policy", optimizer, step=n, wait=True)``. None: this side only reads.
            coordinator: Address of the coordinator, host:port. None: ``PS_COORDINATOR``.
            dtype: Floating-point values are converted to it by the shards. None: as they are.
            security: TLS and tokens. None: from the environment.
        """
        super().__init__()
        self._publish = publish
        self._subscribe = partial(subscribe, name, coordinator=coordinator, dtype=dtype, security=security)
        self._follower: _Follower | None = None

    @property
    def version(self) -> int:
        """Number of the version that this process has; 0: none yet."""
        return self._follower.version if self._follower else 0

    def create_transport(self, **options: Any) -> Any:
        """None: a collector reads from the servers of the job."""
        raise ConfigError("published weights need no transport between processes of TorchRL")

    def _init_on_sender_impl(self, *, model_id: str, context: Any = None, **options: Any) -> None:
        self.model_id = model_id
        self.context = context

    def _init_on_receiver_impl(self, *, model_id: str, context: Any = None, **options: Any) -> None:
        self.model_id = model_id
        self.context = context
        model = context.get_model(model_id) if context is not None else options.get("model")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the collector has no module '{model_id}'", remedy="give it a policy")
        self.model = model

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """On the side of the trainer publish a first version; on the other wait for one, and follow from then on."""
        if self.initialized_on_receiver:
            self._follower = _Follower(self.model, self._subscribe())
            self.synchronized_on_receiver = True
        else:
            self.synchronized_on_sender = True
            if self._publish is not None:
                self._publish()

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Publish a version. Raises ConfigError on a side that only reads.

        What the shards have is published: ``weights`` are not looked at. All collectors get it.
        """
        if self._publish is None:
            raise ConfigError("this side has nothing to publish with", remedy="give the scheme publish=")
        self._publish()

    def receive(self, timeout: float | None = None) -> None:
        """Take the newest version that has arrived, now. Raises what went wrong while versions were followed."""
        if self._follower is None:
            raise InvalidRequest("this side does not follow versions", remedy="connect the scheme of a collector")
        self._follower.take()

    def shutdown(self) -> None:
        """End following. Safe to repeat."""
        follower, self._follower = getattr(self, "_follower", None), None
        if follower is not None:
            follower.close()
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        """For the processes that collect: they publish nothing."""
        return {**super().__getstate__(), "_publish": None, "_follower": None}


class _Follower:
    """Receives versions in a thread of its own; the thread that calls the model takes the newest before each call."""

    def __init__(self, model: nn.Module, versions: Subscription) -> None:
        self.version = 0
        self._model = model
        self._versions = versions
        self._lock = threading.Lock()
        self._arrived: Version | None = next(versions, None)
        self._failed: PsError | None = None
        self.take()
        self._hook = model.register_forward_pre_hook(lambda module, arguments: self.take())
        self._thread = threading.Thread(target=self._follow, name="published-weights", daemon=True)
        self._thread.start()

    def take(self) -> None:
        """Put the newest version that has arrived into the model. Raises what ended the following."""
        with self._lock:
            version, self._arrived = self._arrived, None
            failed = self._failed
        if failed is not None:
            raise failed
        if version is not None:
            _make_room(self._model, version)
            version.apply_(self._model)
            self.version = version.number

    def close(self) -> None:
        """End following; the model keeps its values."""
        self._hook.remove()
        self._versions.close()

    def _follow(self) -> None:
        try:
            for version in self._versions:
                with self._lock:
                    self._arrived = version
        except (PsError, ValueError) as error:
            with self._lock:
                self._failed = error if isinstance(error, PsError) else None


def _make_room(model: nn.Module, version: Version) -> None:
    """Collectors in processes of their own give a model without values. Raises ModelMismatch where some stay so."""
    empty = {name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta}
    if missing := sorted(empty - version.tensors().keys()):
        raise ModelMismatch(
            "the policy of a collector came without values that are not in the published version",
            variable=missing[0],
            remedy="publish buffers, too, or make the policy in each process: policy_factory=",
        )
    if empty:
        device = torch.get_default_device()
        model._apply(lambda value: torch.empty_like(value, device=device) if value.is_meta else value)  # type: ignore[no-untyped-call]
