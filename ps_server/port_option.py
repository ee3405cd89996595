"""The class of options for ports, whose variables Kubernetes may set for purposes of its own."""

from __future__ import annotations

import os

import click

from ps_protocol.cluster.service_links import is_service_link


class PortOption(click.Option):
    """Takes no value from a variable that Kubernetes set for a Service, such as PS_COORDINATOR_PORT=tcp://10.0.0.1:7000."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """The first of the option's variables with another value."""
        given = self.envvar or []
        names = [given] if isinstance(given, str) else list(given)
        if ctx.auto_envvar_prefix and self.name:
            names.append(f"{ctx.auto_envvar_prefix}_{self.name.upper()}")
        values = [os.environ.get(name) for name in names]
        return next((value for value in values if value and not is_service_link(value)), None)
