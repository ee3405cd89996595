"""What was asked of a Ray cluster and what it has, in words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

#: Resources that Ray itself makes for each node.
_OF_NODES = "node:"

Amounts = Mapping[str, float]


def asked(bundles: Sequence[Amounts], strategy: str) -> str:
    """``bundles``, equal ones together, such as "SPREAD of 2 × CPU 1, 1 × CPU 0.5"."""
    kinds = Counter(_amounts(bundle, bundle) for bundle in bundles)
    return f"{strategy} of " + ", ".join(f"{count} × {kind}" for kind, count in kinds.items())


def had(bundles: Sequence[Amounts], total: Amounts, free: Amounts, nodes: int) -> str:
    """Of each resource that ``bundles`` name, how much the cluster has and how much of it is free."""
    names = _names(bundles)
    parts = [f"{name} {total.get(name, 0.0):g} ({free.get(name, 0.0):g} free)" for name in names]
    return f"{nodes} node(s) with " + ", ".join(parts)


def fits_never(bundles: Sequence[Amounts], total: Amounts) -> list[str]:
    """The resources of which ``bundles`` ask for more than the cluster has now, free or not."""
    return [name for name in _names(bundles) if sum(bundle.get(name, 0.0) for bundle in bundles) > total.get(name, 0.0)]


def _names(bundles: Iterable[Amounts]) -> list[str]:
    return list(dict.fromkeys(name for bundle in bundles for name, amount in bundle.items() if amount))


def _amounts(bundle: Amounts, named: Iterable[str]) -> str:
    return " ".join(f"{name} {bundle[name]:g}" for name in named if bundle[name] and not name.startswith(_OF_NODES))
