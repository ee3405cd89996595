"""Limits of the models of a job, checked on a declaration before memory is allocated."""

from __future__ import annotations

from collections.abc import Collection

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import ModelSpec, ShardMap, Variable
from ps_server.limits import (
    BUCKETS,
    MAX_NAME_BYTES,
    MODEL_BYTES,
    MODELS,
    NAMES,
    SLICES,
    TABLES,
    VARIABLES,
    JobLimits,
    OverLimit,
)

_MAX_DIMS = 64

NAME_REMEDY = "use a shorter name, or raise --max-name-bytes of ps-coordinator"

_FLAG = "--max-model-bytes of ps-coordinator (PS_COORDINATOR_MAX_MODEL_BYTES)"


def check_limits(spec: ModelSpec, slices: int, placed: Collection[ShardMap], limits: JobLimits) -> None:
    """Raises OverLimit if the model, together with those ``placed``, or its names or shapes exceed a limit.

    ``slices``: the most slices of this model. The time depends on the number of variables, not on their size.
    """
    check_shapes(spec, limits)
    others = [each.spec for each in placed]
    counts = (
        (MODELS, "models", 1, len(others), limits.max_models),
        (
            VARIABLES,
            "variables",
            len(spec.variables),
            sum(len(each.variables) for each in others),
            limits.max_variables,
        ),
        (SLICES, "slices", slices, sum(len(each.slices) for each in placed), limits.max_slices),
        (TABLES, "tables", len(spec.tables), sum(len(each.tables) for each in others), limits.max_tables),
        (BUCKETS, "buckets of tables", _buckets(spec), sum(map(_buckets, others)), limits.max_buckets),
    )
    for limit, what, added, before, most in counts:
        if added + before > most:
            raise OverLimit.of(
                limit,
                f"model '{spec.name}' is too much for this job: {what}",
                expected=f"at most {most} in all models of a job",
                actual=f"{added}, and {before} in the others",
                remedy="declare fewer or larger parts: fewer models, tables with fewer buckets, larger slices; "
                f"or raise --max-{limit} of ps-coordinator",
            )
    before = sum(nbytes_of(each) for each in others)
    if (added := nbytes_of(spec)) + before > limits.max_model_bytes:
        raise OverLimit.of(
            MODEL_BYTES,
            f"model '{spec.name}' is larger than this job allows",
            expected=f"at most {limits.max_model_bytes} bytes of all models together: {_FLAG}",
            actual=f"{added} bytes, and {before} of the others",
            remedy=f"raise {_FLAG}, if the shards have the memory",
        )


def check_shapes(spec: ModelSpec, limits: JobLimits) -> None:
    """Raises OverLimit for names that are too long, InvalidRequest for shapes that no model of this job can have."""
    named = [("a model", spec.name, limits.max_name_bytes), ("an optimizer", spec.optimizer, limits.max_name_bytes)]
    named += [("a table", table.name, limits.max_name_bytes) for table in spec.tables]
    named += [("a variable", v.name, limits.max_variable_name_bytes) for v in spec.variables]
    for what, name, most in named:
        check_length(f"the name of {what}", name, most, NAME_REMEDY)
    for v in spec.variables:
        _check_shape(v, limits.max_model_bytes)


def check_length(what: str, text: str, most: int = MAX_NAME_BYTES, remedy: str = "") -> None:
    """Raises OverLimit for a ``text`` of more than ``most`` bytes."""
    if len(text) > most or len(text.encode()) > most:
        raise OverLimit.of(
            NAMES,
            f"{what} is too long",
            expected=f"at most {most} bytes",
            actual=f"{len(text)} characters: {text[:40]}…",
            remedy=remedy,
        )


def nbytes_of(spec: ModelSpec) -> int:
    """The bytes of the variables' values."""
    return sum(v.nbytes for v in spec.variables)


def _check_shape(v: Variable, most: int) -> None:
    """Uses bounded arithmetic only: a shape may contain a number with a million digits."""
    if len(v.shape) > _MAX_DIMS:
        raise InvalidRequest(
            "a shape has too many dimensions",
            variable=v.name,
            expected=f"at most {_MAX_DIMS}",
            actual=f"{len(v.shape)}: {v.shape[:8]}",
        )
    if any(size < 0 for size in v.shape):
        raise InvalidRequest("a shape is negative", variable=v.name, actual=str(v.shape))
    nbytes = v.dtype.itemsize
    for size in v.shape:
        # An empty dimension counts as one: the rows of an empty variable are placed as well.
        nbytes *= max(1, size)
        if nbytes > most:
            raise OverLimit.of(
                MODEL_BYTES,
                "a variable is larger than this job allows",
                variable=v.name,
                expected=f"at most {most} bytes: {_FLAG}",
                actual=f"shape {v.shape[:8]} of {v.dtype.value}",
                remedy=f"raise {_FLAG}, if the shards have the memory",
            )


def _buckets(spec: ModelSpec) -> int:
    return sum(table.buckets for table in spec.tables)
