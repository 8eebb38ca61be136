"""The exporter, the alert rules and the dashboard, with a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import MetricDefinition, MetricKind
from kvtier.observe.exporter import Exporter
from kvtier.observe.totals import MetricTotals
from kvtier.tiering.spec import TieringOffloadingSpec
from tests.tiering.reference import BLOCKS_PER_PROMPT, ReferenceEngine, prompts

REPO = Path(__file__).parents[2]
RULES = REPO / "deploy/prometheus/kvtier-rules.yml"
RULE_TESTS = Path(__file__).with_name("rules_test.yml")
DASHBOARD = REPO / "deploy/grafana/kvtier.json"
METRICS_PAGE = REPO / "docs/metrics.md"
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Debian's package prometheus is not installed",
)


def definitions() -> dict[str, MetricDefinition]:
    """The metrics of an engine that has every kind of tier."""
    tiers = [
        {"type": "disk", "path": "/nowhere/kv.slab"},
        {"type": "fs", "root_dir": "/nowhere", "max_bytes": "1GiB"},
        {"type": "obj", "url": "s3://nowhere/kv"},
        {"type": "valkey", "url": "valkey://nowhere:6379"},
        {"type": "example"},
    ]
    return TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": tiers})


def exported_names() -> set[str]:
    suffixes = {
        MetricKind.COUNTER: ("_total",),
        MetricKind.GAUGE: ("",),
        MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
    }
    return {
        name + suffix
        for name, definition in definitions().items()
        for suffix in suffixes[definition.kind]
    }


def expressions() -> list[str]:
    """Those of the dashboard, as Grafana sends them."""
    dashboard = json.loads(DASHBOARD.read_text())
    return [
        target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]


def names_in(text: str) -> set[str]:
    """The metrics that PromQL selects. A group of alternatives stands for each of them."""
    found = set()
    for pattern in re.findall(r'__name__=~\\?"\(vllm:\)\?(kvtier_[^"\\]*)', text):
        groups = [group.split("|") for group in re.findall(r"\(([^)]*)\)", pattern)]
        parts = re.split(r"\([^)]*\)", pattern)
        for chosen in product(*groups):
            found.add("".join(a + b for a, b in zip(parts, [*chosen, ""], strict=True)))
    return found


@pytest.mark.parametrize("file", [RULES, DASHBOARD], ids=lambda file: file.name)
def test_every_metric_that_is_used_exists(file: Path) -> None:
    used = names_in(file.read_text())
    assert len(used) >= 7
    assert used <= exported_names()


def test_every_metric_is_documented() -> None:
    named = set(re.findall(r"`(kvtier_\w+)", METRICS_PAGE.read_text()))
    families = tuple(name for name in named if name.endswith("_"))  # `kvtier_disk_*`
    assert [n for n in definitions() if n not in named and not n.startswith(families)] == []


def test_the_rules_say_what_they_should() -> None:
    for arguments in (["check", "rules", RULES], ["test", "rules", RULE_TESTS]):
        done = subprocess.run(
            ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A server that scrapes one port."""

    def __init__(self, folder: Path, target_port: int) -> None:
        self._port = _free_port()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {
                    "job_name": "kvtier",
                    "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return json.load(answer)["data"]

    def value(self, expression: str) -> float | None:
        """The value of an expression with one result; None while there is none."""
        try:
            result = self.ask("query", query=expression)["result"]
        except OSError:
            assert self._process.poll() is None, "Prometheus has ended"
            return None
        return float(result[0]["value"][1]) if result else None

    def wait_for(self, expression: str, wanted: float) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.value(expression)) != wanted:
            assert time.monotonic() < deadline, f"{expression} is {found}, not {wanted}"
            time.sleep(0.2)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self._log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ReferenceEngine]:
    disk = {"type": "disk", "path": str(tmp_path / "kv.slab"), "max_bytes": "64MiB"}
    with ReferenceEngine(disk) as engine:
        yield engine


def test_prometheus_sees_what_an_engine_does(engine: ReferenceEngine, tmp_path: Path) -> None:
    totals = MetricTotals(engine.metric_definitions)
    some = prompts(4)
    engine.serve(some)
    engine.settle()
    engine.serve_from_tiers(some)
    engine.settle()
    totals.add(engine.take_stats())
    exporter = Exporter(totals, port=0)
    prometheus = Prometheus(tmp_path, exporter.port)
    try:
        loaded = 'kvtier_tier_blocks_total{tier="0:disk",direction="load"}'
        blocks = totals.counters()['kvtier_tier_blocks{tier="0:disk",direction="load"}']
        assert blocks == BLOCKS_PER_PROMPT * len(some)
        prometheus.wait_for(loaded, blocks)
        series = totals.histograms()['kvtier_tier_seconds{tier="0:disk",direction="load"}']
        seconds = 'kvtier_tier_seconds_{}{{tier="0:disk",direction="load"}}'
        assert prometheus.value(seconds.format("count")) == sum(series["counts"])
        assert prometheus.value(seconds.format("sum")) == pytest.approx(series["sum"])
        assert prometheus.value('kvtier_tier_seal_failures_total{reason="digest"}') == 0
        assert prometheus.value("sum(kvtier_prompt_tokens_total)") == 2 * sum(map(len, some))
        engine.serve_from_tiers(some)
        engine.settle()
        totals.add(engine.take_stats())
        prometheus.wait_for(loaded, 2 * blocks)
        for expression in expressions():
            prometheus.ask("query", query=expression)  # raises if it cannot be evaluated
        shown = [e for e in expressions() if prometheus.ask("query", query=e)["result"]]
        assert len(shown) > len(expressions()) / 2
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert len(rules) == RULES.read_text().count("- alert:")
        assert {rule["health"] for rule in rules} == {"ok"}
        assert {rule["state"] for rule in rules} == {"inactive"}
    finally:
        prometheus.close()
        exporter.close()


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'kvtier\[metrics\]'"):
        Exporter(MetricTotals({}), port=0)
