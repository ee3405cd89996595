"""Clusters of real processes, as the tests of recovery have them."""

from tests.recovery.conftest import launch, zygote  # noqa: F401
