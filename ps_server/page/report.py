"""A job as one HTML file that opens anywhere, without a network: curves, events, members, configuration."""

from __future__ import annotations

import base64
import hashlib
import time

from jinja2 import Environment
from markupsafe import Markup

from ps_protocol.cluster.history import JobHistory
from ps_server.page.app import STATIC, templates
from ps_server.page.messages import to_json, whole

SCRIPTS = ("charts.js", "sections.js", "page.js", "report.js")


def report_html(history: JobHistory, title: str) -> str:
    """The report of a job under ``title``, which may be any text."""
    environment: Environment = templates()
    # Files of this package: they are put into the page as they are.
    script = Markup("\n".join((STATIC / name).read_text() for name in SCRIPTS))
    style = Markup((STATIC / "page.css").read_text())
    return environment.get_template("report.html").render(
        title=title,
        written=time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(history.at_seconds)),
        data=Markup(to_json(whole(history))),
        script=script,
        style=style,
        policy=f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'",
    )


def _hash(text: str) -> str:
    """By which a Content-Security-Policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
