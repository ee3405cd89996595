"""The ids and bags of a forward pass: checked, and with each id once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ps_protocol.errors import InvalidRequest
from ps_worker.tables.compiled import Ids, unique
from ps_worker.tables.table import Table

_HOST = torch.device("cpu")
_ID_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """The ids of one table in one forward pass, of one feature or several; ``padding_id`` has no row."""

    table: Table
    ids: tuple[torch.Tensor, ...]
    padding_id: int | None = None

    def versions(self) -> tuple[int, ...]:
        """Return the versions of the ids, which rise when ids are written in place."""
        return tuple(-1 if ids.is_inference() else ids._version for ids in self.ids)


@dataclass(frozen=True, slots=True)
class DistinctIds:
    """The distinct ids of a request."""

    #: int64 [u], without the padding id.
    ids: Ids
    #: The index of the row of each id of the request, int64 [n], on the device of the ids.
    places: torch.Tensor
    #: Row 0 is that of the padding id; the rows of ``ids`` follow it.
    padded: bool
    #: No id repeats: ``places`` counts up from 0.
    all_different: bool

    @property
    def rows(self) -> int:
        """Rows that ``places`` point to."""
        return len(self.ids) + self.padded


@dataclass(frozen=True, slots=True)
class Bags:
    """The ids of one feature, and the borders of its bags."""

    #: 1-D.
    ids: torch.Tensor
    #: int64 [bags + 1], from 0 to the number of ids.
    offsets: torch.Tensor
    #: As many as ids.
    weights: torch.Tensor | None = None


def check_ids(ids: torch.Tensor, table: str) -> None:
    """Raise InvalidRequest unless ``ids`` are a dense tensor of int64 or int32."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in _ID_DTYPES or ids.layout is not torch.strided:
        raise _wrong(
            table, "ids are of a wrong type", "an int64 or int32 tensor", getattr(ids, "dtype", type(ids).__name__)
        )


def distinct(request: RowRequest) -> DistinctIds:
    """Return each id once: ids on the CPU in order of appearance, ids on a device in ascending order."""
    padded = request.padding_id is not None
    parts = [ids.detach().reshape(-1).to(torch.int64) for ids in request.ids]
    if padded:
        # In front, so that it gets row 0.
        parts.insert(0, torch.tensor([request.padding_id], dtype=torch.int64, device=parts[0].device))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    if joined.device == _HOST:
        found, inverse = unique(np.ascontiguousarray(joined.numpy()))
        places = torch.from_numpy(inverse)
    else:
        found, places = _unique_on_device(joined, first=padded)
    if padded:
        return DistinctIds(found[1:], places[1:], padded=True, all_different=False)
    return DistinctIds(found, places, False, all_different=joined.device == _HOST and len(found) == len(joined))


def _unique_on_device(ids: torch.Tensor, *, first: bool) -> tuple[Ids, torch.Tensor]:
    """``first``: the first of ``ids`` gets place 0."""
    found, places = torch.unique(ids, return_inverse=True)
    if first:
        order = torch.arange(len(found), device=ids.device)
        order[0], order[places[0]] = places[0], 0
        found, places = found[order], order[places]
    return found.cpu().numpy(), places


def bags_of(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    *,
    table: str,
    mode: str,
    include_last_offset: bool,
) -> Bags:
    """Return the bags of ids and offsets, as ``nn.EmbeddingBag`` reads them. Raises InvalidRequest where they do not
    fit.
    """
    check_ids(ids, table)
    if weights is not None:
        _check_weights(weights, ids, table, mode)
    if ids.dim() == 2:
        if offsets is not None:
            raise _wrong(table, "offsets come with 2-D ids", "no offsets: each row is a bag", "offsets")
        # Not ``arange`` in steps of the width, which may be 0.
        ends = torch.arange(len(ids) + 1, device=ids.device) * ids.shape[1]
        return Bags(ids, ends, weights)
    if ids.dim() != 1:
        raise _wrong(table, "ids have a wrong shape", "1-D with offsets, or 2-D", tuple(ids.shape))
    if offsets is None:
        raise _wrong(table, "1-D ids come without offsets", "offsets: where each bag begins", "none")
    ends = _checked_offsets(offsets, len(ids), table, include_last_offset=include_last_offset)
    last = int(ends[-1])
    ends = ends.to(ids.device)
    if last < len(ids):
        return Bags(ids[:last], ends, None if weights is None else weights[:last])
    return Bags(ids, ends, weights)


def _checked_offsets(offsets: torch.Tensor, count: int, table: str, *, include_last_offset: bool) -> torch.Tensor:
    """All borders of the bags, int64 [bags + 1], on the CPU."""
    if not isinstance(offsets, torch.Tensor) or offsets.dtype not in _ID_DTYPES or offsets.dim() != 1:
        actual = (offsets.dtype, tuple(offsets.shape)) if isinstance(offsets, torch.Tensor) else type(offsets).__name__
        raise _wrong(table, "offsets are of a wrong type", "a 1-D int64 or int32 tensor", actual)
    borders = offsets.detach().to("cpu", torch.int64)
    if include_last_offset and not len(borders):
        raise _wrong(table, "offsets are empty", "at least one, with include_last_offset", "none")
    if len(borders) and int(borders[0]) != 0:
        raise _wrong(table, "offsets do not begin with 0", "0", int(borders[0]))
    if bool((borders[1:] < borders[:-1]).any()):
        at = int((borders[1:] < borders[:-1]).nonzero()[0]) + 1
        raise _wrong(table, "offsets are out of order", f"offset {at} at least {borders[at - 1]}", int(borders[at]))
    if len(borders) and int(borders[-1]) > count:
        raise _wrong(table, "offsets go beyond the ids", f"at most {count}", int(borders[-1]))
    if include_last_offset:
        return borders
    if not len(borders) and count:
        raise _wrong(table, "ids are in no bag", "an offset for each bag", f"{count} ids and no offset")
    return torch.cat((borders, torch.tensor([count])))


def _check_weights(weights: torch.Tensor, ids: torch.Tensor, table: str, mode: str) -> None:
    if mode != "sum":
        raise _wrong(table, "per_sample_weights need mode 'sum'", "sum", mode)
    if not isinstance(weights, torch.Tensor) or weights.dtype is not torch.float32:
        actual = getattr(weights, "dtype", type(weights).__name__)
        raise _wrong(table, "per_sample_weights are of a wrong type", "a float32 tensor", actual)
    if weights.shape != ids.shape:
        raise _wrong(table, "per_sample_weights have a wrong shape", tuple(ids.shape), tuple(weights.shape))


def _wrong(table: str, what: str, expected: object, actual: object) -> InvalidRequest:
    return InvalidRequest(f"{what}; nothing was looked up", variable=table, expected=str(expected), actual=str(actual))
