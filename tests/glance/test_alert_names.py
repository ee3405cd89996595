"""docs/monitoring.md names alert rules that exist, and words that alerts of the page have."""

import re
from pathlib import Path

import yaml

from ps_server.glance import alerts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()


def test_rules_that_are_named_exist():
    groups = yaml.safe_load((ROOT / "deploy" / "monitoring" / "rules.yml").read_text())["groups"]
    rules = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    named = set(re.findall(r"TorchPs\w+", PAGE))
    assert named
    assert named - rules == set()


def test_alerts_of_the_page_have_the_words_of_the_table():
    source = Path(alerts.__file__).read_text()
    for words in ("is missing", "has sent no heartbeat", "workers are there", " reports "):
        assert words in source
        assert words.strip() in PAGE
