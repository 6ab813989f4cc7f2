"""docs/operations.md can be pasted: its rules are YAML over metrics there are, its lists are those of the code."""

import re
from typing import Any

import msgspec
import pytest

from kvatlas.admin import METRICS
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.errors import KvAtlasError
from kvatlas.gateway.forwarded_paths import FORWARDED_PATHS, FORWARDED_PREFIXES, WITHHELD_PATHS
from support.golden import PROJECT_ROOT

PAGE = (PROJECT_ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
LABELS = {metric.name: set(metric.labels) for metric in METRICS}
SCRAPE_LABELS = {"instance", "job"}


def alerts() -> list[dict[str, Any]]:
    """The rules, as Prometheus would read them."""
    (block,) = [text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "groups:" in text]
    (group,) = msgspec.yaml.decode(block)["groups"]
    return group["rules"]


def codes() -> set[str]:
    """Every error code."""
    found, waiting = set(), [KvAtlasError]
    while waiting:
        cls = waiting.pop()
        found.add(cls.code)
        waiting.extend(cls.__subclasses__())
    return found


def test_every_metric_named_is_there() -> None:
    """No rule and no row of the tables names a metric that is not exported."""
    named = set(re.findall(r"kvatlas_[a-z_]+", PAGE))
    assert named - set(LABELS) == set()
    assert len(named) > 10


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_a_rule_uses_labels_its_metrics_have(rule: dict[str, Any]) -> None:
    """Selectors, groupings and the summary name only labels of the metrics in the expression; brackets are closed."""
    metrics = re.findall(r"kvatlas_[a-z_]+", rule["expr"])
    known = set().union(*(LABELS[name] for name in metrics)) | SCRAPE_LABELS
    grouped = {
        name.strip() for names in re.findall(r"(?:by|on) \(([^)]*)\)", rule["expr"]) for name in names.split(",")
    }
    selected = set(re.findall(r"[{,]\s*([a-z_]+)\s*[=!]", rule["expr"]))
    shown = set(re.findall(r"\$labels\.([a-z_]+)", rule["annotations"]["summary"]))
    assert grouped | selected | shown <= known
    assert all(rule["expr"].count(a) == rule["expr"].count(b) for a, b in ("()", "{}", "[]"))


def test_codes_in_rules_exist() -> None:
    """The alternatives of the refused rule each match an error code."""
    (pattern,) = re.findall(r'code=~"([^"]+)"', PAGE)
    assert [part for part in pattern.split("|") if not any(re.fullmatch(part, code) for code in codes())] == []


def test_the_list_of_forwarded_paths_is_the_real_one() -> None:
    """Each path outside /v1/ and /v2/ that is forwarded, and each inside that is not, stands in its section."""
    (section,) = re.findall(r"## What is forwarded\n(.*?)\n## ", PAGE, re.DOTALL)
    forwarded, withheld = (
        set(re.findall(r"`(/[a-z0-9/_]+)`", line))
        for line in (section.split("* ")[2].split("\n\n")[0], section.split("* ")[1])
    )
    assert forwarded == FORWARDED_PATHS
    assert withheld - set(FORWARDED_PREFIXES) == WITHHELD_PATHS


def test_settings_named_exist() -> None:
    """What looks like a setting of ours is one."""
    fields = {field.name for struct in (ServeConfig, WorkerConfig) for field in msgspec.structs.fields(struct)}
    named = set(re.findall(r"`((?:[a-z]+_)+(?:s|paths|failures))`", PAGE))
    assert {"shutdown_delay_s", "drain_s", "forward_all_paths", "health_interval_s"} <= named
    assert named - fields - {"buffer_steps"} - set(LABELS) == set()
