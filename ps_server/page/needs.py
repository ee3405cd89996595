"""The libraries of the page, which are an extra of the package."""

from __future__ import annotations

from importlib.util import find_spec

from ps_protocol.errors import ConfigError

LIBRARIES = ("jinja2", "starlette", "uvicorn")


def check_libraries(what: str, names: tuple[str, ...] = LIBRARIES) -> None:
    """Raises ConfigError, with the command that installs them, when one that ``what`` needs is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what} needs libraries that are not installed: {', '.join(missing)}",
            remedy="install them with: pip install 'torch-ps[page]'",
        )
