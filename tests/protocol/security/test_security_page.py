"""docs/security.md shows the table of methods and roles as the code has it."""

from pathlib import Path

from ps_protocol.security.roles import METHODS, AccessRole
from ps_protocol.security.settings import VARIABLES

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
BEGIN, END = "<!-- roles -->\n", "<!-- /roles -->\n"


def table() -> str:
    """Rows of methods with the same roles, in Markdown."""
    by_roles: dict[tuple[str, ...], list[str]] = {}
    for name, (roles, _) in METHODS.items():
        service, method = name.split("/")[1:]
        if roles is not None and service.startswith("ps_protocol"):
            allowed = tuple(role.value for role in AccessRole if role in roles)
            by_roles.setdefault(allowed, []).append(f"`{service.rpartition('.')[2]}.{method}`")
    rows = [f"| {', '.join(methods)} | {', '.join(roles)} |" for roles, methods in by_roles.items()]
    return "\n".join(["| methods | roles |", "|---|---|", *rows]) + "\n"


def test_the_page_has_the_table():
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table(), "put this there:\n" + table()


def test_the_page_names_every_variable():
    assert [name for name in VARIABLES.values() if name not in PAGE.read_text()] == []
