"""Modules with tables, for use in place of ``nn.Embedding`` and ``nn.EmbeddingBag``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_worker.tables.batch import Bags, RowRequest, bags_of, check_ids
from ps_worker.tables.binding import bound_of
from ps_worker.tables.pooling import gathered, pooled
from ps_worker.tables.table import Table, TableModule

_MODES = ("sum", "mean", "max")


class Embedding(TableModule):
    """As ``nn.Embedding``, for ids of any value; its rows are on the shards.

    It has no parameters of its own: rows come from the shards for each forward pass, and their gradients are pushed by
    ``optimizer.step``. In ``torch.no_grad()`` they are the newest rows. Used from the training thread.
    """

    def __init__(self, table: Table | TableModule | int, *, padding_id: int | None = None, **settings: Any) -> None:
        """Make a module of one table.

        Args:
            table: See ``Cluster.embedding``.
            padding_id: Id whose row is zero and stays so.
            **settings: Settings of a new table.
        """
        super().__init__()
        self.padding_id = padding_id
        self.tables = (table_of(table, settings),)
        self.embedding_dim = self.tables[0].dim

    @property
    def padding_idx(self) -> int | None:
        """``padding_id``, by torch's name."""
        return self.padding_id

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the row of each id.

        Args:
            input: Ids, int64 or int32, of any shape.

        Returns:
            float32 [*shape, dim].

        Raises:
            InvalidRequest: The ids are of another kind, or the table is not bound yet.
            PsError: A shard did not answer in time, or refused.
        """
        request = self.request(input)
        [(rows, distinct)] = bound_of(request.table).rows([request])
        return gathered(rows, distinct, input.shape)

    def request(self, ids: torch.Tensor) -> RowRequest:
        """Return the request of a forward pass with ``ids``."""
        check_ids(ids, self.tables[0].name)
        return RowRequest(self.tables[0], (ids,), self.padding_id)

    def extra_repr(self) -> str:
        """Return what ``repr`` shows."""
        return f"{self.tables[0]!r}, padding_id={self.padding_id}"


class EmbeddingBag(TableModule):
    """As ``nn.EmbeddingBag``, for ids of any value; its rows are on the shards. See ``Embedding``."""

    def __init__(
        self,
        table: Table | TableModule | int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_id: int | None = None,
        **settings: Any,
    ) -> None:
        """Make a module of one table.

        Args:
            table: See ``Cluster.embedding``.
            mode: "sum", "mean" or "max" of the rows of a bag.
            include_last_offset: The offsets end with the number of ids, as in torch.
            padding_id: Id that is in no bag.
            **settings: Settings of a new table.
        """
        super().__init__()
        self.mode = _checked_mode(mode)
        self.include_last_offset = include_last_offset
        self.padding_id = padding_id
        self.tables = (table_of(table, settings),)
        self.embedding_dim = self.tables[0].dim

    @property
    def padding_idx(self) -> int | None:
        """``padding_id``, by torch's name."""
        return self.padding_id

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the pooled rows of each bag; zeros for an empty one.

        Args:
            input: Ids, int64 or int32: [n] with ``offsets``, or [bags, n] with a bag in each row.
            offsets: Where each bag begins, [bags].
            per_sample_weights: Weights of the rows, float32, in the shape of ``input``; for "sum" only.

        Returns:
            float32 [bags, dim].

        Raises:
            InvalidRequest: Ids, offsets or weights do not fit together, or the table is not bound yet.
            PsError: A shard did not answer in time, or refused.
        """
        bags = bags_of(
            input,
            offsets,
            per_sample_weights,
            table=self.tables[0].name,
            mode=self.mode,
            include_last_offset=self.include_last_offset,
        )
        request = self.request(bags.ids)
        [(rows, distinct)] = bound_of(request.table).rows([request])
        return pooled(rows, distinct.places, bags.offsets, _flat(bags.weights), mode=self.mode, padded=distinct.padded)

    def request(self, ids: torch.Tensor) -> RowRequest:
        """Return the request of a forward pass with ``ids``."""
        check_ids(ids, self.tables[0].name)
        return RowRequest(self.tables[0], (ids,), self.padding_id)

    def extra_repr(self) -> str:
        """Return what ``repr`` shows."""
        return f"{self.tables[0]!r}, mode={self.mode!r}, padding_id={self.padding_id}"


class EmbeddingBags(TableModule):
    """Several features, each as an ``EmbeddingBag`` on a table of its own or a common one, looked up in one message per
    shard.
    """

    def __init__(
        self,
        features: Mapping[str, Table | TableModule | tuple[Table | TableModule, str]],
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_id: int | None = None,
    ) -> None:
        """Make a module of several features.

        Args:
            features: By name, the table of each feature, or the table and a mode of its own.
            mode: "sum", "mean" or "max", for features without their own.
            include_last_offset: The offsets end with the number of ids, as in torch.
            padding_id: Id that is in no bag.
        """
        super().__init__()
        if not features:
            raise InvalidRequest("embedding_bags() without a feature")
        pairs = {name: given if isinstance(given, tuple) else (given, mode) for name, given in features.items()}
        self.features = {name: table_of(table, {}) for name, (table, _) in pairs.items()}
        self.modes = {name: _checked_mode(own) for name, (_, own) in pairs.items()}
        self.include_last_offset = include_last_offset
        self.padding_id = padding_id
        self.tables = tuple({id(table): table for table in self.features.values()}.values())

    def forward(
        self,
        ids: Mapping[str, torch.Tensor],
        offsets: Mapping[str, torch.Tensor] | None = None,
        per_sample_weights: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return, by feature, what ``EmbeddingBag`` returns, in the order of the features.

        Args:
            ids: Ids of every feature; see ``EmbeddingBag.forward``.
            offsets: Offsets of the features with ids [n].
            per_sample_weights: Weights of the features that have some.

        Returns:
            float32 [bags, dim] for each feature.

        Raises:
            InvalidRequest: A feature is missing or unknown; or as ``EmbeddingBag``.
            PsError: A shard did not answer in time, or refused.
        """
        self._check_names(ids, exactly=True)
        for given in (offsets or {}, per_sample_weights or {}):
            self._check_names(given, exactly=False)
        bags = {
            name: bags_of(
                ids[name],
                (offsets or {}).get(name),
                (per_sample_weights or {}).get(name),
                table=table.name,
                mode=self.modes[name],
                include_last_offset=self.include_last_offset,
            )
            for name, table in self.features.items()
        }
        return self._pooled(bags, self.requests({name: each.ids for name, each in bags.items()}))

    def _pooled(self, bags: Mapping[str, Bags], requests: list[RowRequest]) -> dict[str, torch.Tensor]:
        found = bound_of(requests[0].table).rows(requests)
        result = dict.fromkeys(self.features, torch.empty(0))
        for request, (rows, distinct) in zip(requests, found, strict=True):
            begin = 0
            for name in self._features_of(request.table):
                end = begin + bags[name].ids.numel()
                result[name] = pooled(
                    rows,
                    distinct.places[begin:end],
                    bags[name].offsets,
                    _flat(bags[name].weights),
                    mode=self.modes[name],
                    padded=distinct.padded,
                )
                begin = end
        return result

    def requests(self, ids: Mapping[str, torch.Tensor]) -> list[RowRequest]:
        """Return the requests of a forward pass with ``ids``: one for all features of a table."""
        self._check_names(ids, exactly=True)
        for name, table in self.features.items():
            check_ids(ids[name], table.name)
        return [
            RowRequest(table, tuple(ids[name] for name in self._features_of(table)), self.padding_id)
            for table in self.tables
        ]

    def _features_of(self, table: Table) -> list[str]:
        return [name for name, own in self.features.items() if own is table]

    def _check_names(self, given: Mapping[str, torch.Tensor], *, exactly: bool) -> None:
        unknown = [name for name in given if name not in self.features]
        missing = [name for name in self.features if name not in given] if exactly else []
        if unknown or missing:
            raise InvalidRequest(
                "these are not the features of the module; nothing was looked up",
                expected=", ".join(self.features),
                actual=", ".join(given) or "none",
            )

    def extra_repr(self) -> str:
        """Return what ``repr`` shows."""
        return "\n".join(f"{name}: {table!r}, mode={self.modes[name]!r}" for name, table in self.features.items())


def embedding(table: int | Table | TableModule, *, padding_id: int | None = None, **settings: Any) -> Embedding:
    """Make a module as ``nn.Embedding`` for ids of any value: ``cluster.embedding(16, name="user")``.

    Its rows are on the shards from ``Cluster.optimizer`` on.

    Args:
        table: Numbers of a row (``dim``) of a new table; or an existing table or module, whose rows are shared.
        padding_id: Id whose row is zero and stays so.
        **settings: Settings of a new table: ``name``, and the other arguments of ``ps_worker.tables.Table``.

    Raises:
        InvalidRequest: A setting is out of its range.
        UnsupportedOptimizer: No shard has such a row optimizer.
        ConfigError: A setting is unknown.
    """
    return Embedding(table, padding_id=padding_id, **settings)


def embedding_bag(
    table: int | Table | TableModule,
    *,
    mode: str = "mean",
    include_last_offset: bool = False,
    padding_id: int | None = None,
    **settings: Any,
) -> EmbeddingBag:
    """Make a module as ``nn.EmbeddingBag`` for ids of any value.

    Args:
        table: See ``embedding``.
        mode: "sum", "mean" or "max" of the rows of a bag.
        include_last_offset: The offsets end with the number of ids, as in torch.
        padding_id: Id that is in no bag.
        **settings: See ``embedding``.

    Raises:
        InvalidRequest: As ``embedding``.
        UnsupportedOptimizer: As ``embedding``.
        ConfigError: As ``embedding``, and for an unknown ``mode``.
    """
    return EmbeddingBag(table, mode=mode, include_last_offset=include_last_offset, padding_id=padding_id, **settings)


def embedding_bags(
    features: Mapping[str, Table | TableModule | tuple[Table | TableModule, str]],
    *,
    mode: str = "mean",
    include_last_offset: bool = False,
    padding_id: int | None = None,
) -> EmbeddingBags:
    """Make one module of several features, each as an ``embedding_bag``, looked up in one message per shard.

    Args:
        features: By name, the table of each feature, or the table and a mode of its own. Features may share a table.
        mode: "sum", "mean" or "max", for features without their own.
        include_last_offset: The offsets end with the number of ids, as in torch.
        padding_id: Id that is in no bag.

    Raises:
        InvalidRequest: There is no feature, or one has no table.
        ConfigError: Unknown ``mode``.
    """
    return EmbeddingBags(features, mode=mode, include_last_offset=include_last_offset, padding_id=padding_id)


def table_of(given: Table | TableModule | int, settings: Mapping[str, Any]) -> Table:
    """Return the table given, or a new one. Raises InvalidRequest for settings of an existing table, and for other
    types.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        return Table(given, **settings)
    if isinstance(given, TableModule) and len(given.tables) == 1:
        given = given.tables[0]
    if not isinstance(given, Table):
        raise InvalidRequest(
            "this is not a table",
            expected="the dim of a new one, a table, or a module with one table",
            actual=type(given).__name__,
        )
    if settings:
        raise InvalidRequest(
            "a table that is shared has its settings already",
            variable=given.name,
            actual=", ".join(settings),
            remedy="leave them out, or give the dim of a new table with another name",
        )
    return given


def _checked_mode(mode: str) -> str:
    if mode not in _MODES:
        raise ConfigError("unknown value for mode", expected=", ".join(map(repr, _MODES)), actual=repr(mode))
    return mode


def _flat(weights: torch.Tensor | None) -> torch.Tensor | None:
    return None if weights is None else weights.reshape(-1)
