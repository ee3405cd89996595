"""Decides whether a declared model can go on from a saved one, and in what they differ."""

from __future__ import annotations

from collections.abc import Iterator

from ps_protocol.errors import ModelMismatch
from ps_protocol.model import ModelSpec, Options, Variable
from ps_protocol.optimizers import EXECUTION_HINTS

#: An error stays readable.
_SHOWN_DIFFERENCES = 20


def check_same_model(saved: ModelSpec, declared: ModelSpec, where: str) -> None:
    """Raises one ModelMismatch that lists every difference when ``declared`` cannot go on from ``saved``.

    ``where`` is the checkpoint. The order of variables, policies, and arguments such as the learning rate may differ.
    """
    differences = list(_differences(saved, declared))
    if not differences:
        return
    shown = differences[:_SHOWN_DIFFERENCES]
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    count = f"{len(differences)} difference{'s' if len(differences) > 1 else ''}"
    raise ModelMismatch(
        f"model '{declared.name}' is not the one in {where}, {count}:\n  " + "\n  ".join(shown),
        remedy="restore a checkpoint of this model, or run the script that the checkpoint was made with",
    )


def _differences(saved: ModelSpec, declared: ModelSpec) -> Iterator[str]:
    if saved.optimizer != declared.optimizer:
        yield f"optimizer: {declared.optimizer} instead of {saved.optimizer}"
    if saved.unsplit != declared.unsplit:
        yield f"unsplit: {declared.unsplit} instead of {saved.unsplit}"
    before, after = ({v.name: v for v in spec.variables} for spec in (saved, declared))
    for name, variable in before.items():
        if name not in after:
            yield f"variable '{name}' is missing"
        else:
            yield from _variable_differences(variable, after[name])
    for name in after:
        if name not in before:
            yield f"variable '{name}' is extra"
    if len(saved.group_options) != len(declared.group_options):
        yield f"parameter groups: {len(declared.group_options)} instead of {len(saved.group_options)}"
    for group, (ours, theirs) in enumerate(zip(saved.group_options, declared.group_options, strict=False)):
        first, later = _fixed(ours), _fixed(theirs)
        for name in sorted(first.keys() & later.keys()):
            if first[name] != later[name]:
                yield f"parameter group {group}: {name} {theirs[name]!r} instead of {ours[name]!r}"


def _variable_differences(before: Variable, after: Variable) -> Iterator[str]:
    for what, ours, theirs in (
        ("shape", before.shape, after.shape),
        ("dtype", before.dtype.value, after.dtype.value),
        ("kind", before.kind.value, after.kind.value),
        ("parameter group", before.group, after.group),
    ):
        if ours != theirs:
            yield f"variable '{before.name}': {what} {theirs} instead of {ours}"


def _fixed(options: Options) -> dict[str, bool]:
    """The arguments that decide which state the optimizer keeps."""
    return {
        name: bool(value)
        for name, value in options.items()
        if (isinstance(value, bool) or name == "momentum") and name not in EXECUTION_HINTS
    }
