"""The engine of vLLM that fetches published versions: its interface is that of vLLM 0.25."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_worker.weights import Subscription, subscribe


@dataclass
class PublishedWeightInit(WeightTransferInitInfo):
    """Which weights are read."""

    name: str = "policy"
    #: host:port; None: PS_COORDINATOR.
    coordinator: str | None = None
    #: To which shards convert floating-point values, such as "bfloat16"; None: as they are.
    dtype: str | None = None


@dataclass
class PublishedWeightUpdate(WeightTransferUpdateInfo):
    """Which version is loaded: the number that ``cluster.publish`` returned."""

    number: int


class PublishedWeightEngine(WeightTransferEngine[PublishedWeightInit, PublishedWeightUpdate]):
    """Used by one worker of a server. Each worker fetches the version by itself, from the second on as what changed."""

    init_info_cls = PublishedWeightInit
    update_info_cls = PublishedWeightUpdate

    _versions: Subscription | None = None

    def init_transfer_engine(self, init_info: PublishedWeightInit) -> None:
        """Begin to read. Raises ConfigError."""
        self.shutdown()
        dtype = None if init_info.dtype is None else getattr(torch, init_info.dtype, None)
        if init_info.dtype is not None and not isinstance(dtype, torch.dtype):
            raise ConfigError("torch has no such dtype", actual=init_info.dtype)
        self._versions = subscribe(init_info.name, coordinator=init_info.coordinator, dtype=dtype)

    def start_weight_update(self) -> None:
        """Layers take weights in the format of a checkpoint from here on."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: PublishedWeightUpdate) -> None:
        """Fetch the version, and load it once all of it is here and checked. Raises VersionGone, Unavailable."""
        if self._versions is None:
            raise InvalidRequest("weights are received before init_transfer_engine", remedy="initialise the engine")
        tensors = self._versions.fetch(update_info.number).tensors()

        def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in tensors.items():
                yield name, value.to(self.device)

        self.model.load_weights(one_by_one())

    def finish_weight_update(self) -> None:
        """Layers compute with the new weights from here on."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """End reading. Safe to repeat."""
        versions, self._versions = self._versions, None
        if versions is not None:
            versions.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        """Raises ConfigError: the shards of the job send the weights."""
        raise ConfigError("the trainer sends no weights to servers", remedy="call cluster.publish, then update_weights")
