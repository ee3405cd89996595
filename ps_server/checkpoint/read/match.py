"""Compares a declared model with a saved one."""

from __future__ import annotations

from collections.abc import Iterator

from ps_protocol.model.optimizers import EXECUTION_HINTS
from ps_protocol.model.spec import ModelSpec, Options
from ps_server.model_differences import in_structure, raise_differences


def check_same_model(saved: ModelSpec, declared: ModelSpec, where: str) -> None:
    """Raises one ModelMismatch that lists every difference when ``declared`` does not fit ``saved``.

    ``where`` is the checkpoint. The order of variables, policies, and arguments such as the learning rate may differ.
    """
    raise_differences(
        f"model '{declared.name}' is not the one in {where}",
        [*in_structure(saved, declared), *_in_options(saved, declared)],
        "restore a checkpoint of this model, or run the script that the checkpoint was made with",
    )


def _in_options(saved: ModelSpec, declared: ModelSpec) -> Iterator[str]:
    for group, (ours, theirs) in enumerate(zip(saved.group_options, declared.group_options, strict=False)):
        first, later = _fixed(ours), _fixed(theirs)
        for name in sorted(first.keys() & later.keys()):
            if first[name] != later[name]:
                yield f"parameter group {group}: {name} {theirs[name]!r} instead of {ours[name]!r}"


def _fixed(options: Options) -> dict[str, bool]:
    """The arguments that determine which state the optimizer has."""
    return {
        name: bool(value)
        for name, value in options.items()
        if (isinstance(value, bool) or name == "momentum") and name not in EXECUTION_HINTS
    }
