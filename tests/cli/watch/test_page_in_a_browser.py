"""The status page in a real browser: what it shows, what it asks for, and for whom it works."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvtier.config.sizes import as_size
from kvtier.observe.client import ask, find_engine
from tests.cli.watch.browser import Page, chromium, open_pages
from tests.cli.watch.engine_process import EngineProcess
from tests.cli.watch.test_overview import REQUEST
from tests.cli.watch.test_page import serving
from tests.cli.watch.told_engine import BLOCK_BYTES, ToldEngine, of_tier

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs chromium, of Debian's package")

TEN_TIMES_AS_OFTEN = """
const wait = window.setTimeout;
window.setTimeout = (call, ms) => wait(call, ms / 10);
"""
"""So that a test need not wait for the page's next question."""
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_pages(tmp_path_factory.mktemp("browser")) as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=TEN_TIMES_AS_OFTEN)
        yield page


@pytest.fixture(autouse=True)
def nothing_to_complain_about(browser: Page) -> Iterator[None]:
    """At its end, no page has written to its console or asked for anything beyond its own
    server."""
    browser.requests.clear()
    browser.complaints.clear()
    browser.resize(1400)
    browser.prefer("light")
    yield
    assert browser.complaints == []
    asked = {urlsplit(url) for url in browser.requests if not url.startswith(("about:", "data:"))}
    assert {url.hostname for url in asked} == {"127.0.0.1"}
    assert {url.path for url in asked} == {"/", "/status.json", "/hour.json"}


@contextmanager
def served(browser: Page) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """As `serving`. The browser leaves the page before its server ends."""
    with serving() as process_host_port:
        try:
            yield process_host_port
        finally:
            browser.call("Page.navigate", url="about:blank")
            browser.wait_for("location.href == 'about:blank'")


def figure(page: Page, tier: str, name: str) -> str:
    return page.text(f'[data-tier="{tier}"] [data-is="{name}"]')


def test_a_real_engine_is_shown_with_the_values_of_its_status(
    browser: Page, tmp_path: Path, run_dir: Path
) -> None:
    with EngineProcess(tmp_path / "engine", run_dir) as engine, served(browser) as (_, host, port):
        engine.serve(0, 8)
        engine.serve(0, 4)
        browser.open(f"http://{host}:{port}/")
        status = ask(find_engine(), "status")
        counters, gauges = status["counters"], status["gauges"]
        assert counters["kvtier_cpu_loaded_blocks"] > 0
        assert counters[of_tier("blocks", "0:disk", "direction", "load")] > 0
        assert status["engine"]["model"] in browser.text("h1")
        assert f"process {engine.pid}" in browser.text("#state")
        for name in ("stored", "loaded", "evicted"):
            shown = counters.get(f"kvtier_cpu_{name}_blocks", 0)
            assert figure(browser, "host", name) == f"{shown:,.0f}"
        for tier in ("0:disk", "1:fs"):
            for name, direction in (("stored", "store"), ("loaded", "load")):
                blocks = counters.get(of_tier("blocks", tier, "direction", direction), 0)
                assert figure(browser, tier, name) == f"{blocks:,.0f}"
            hits = counters.get(of_tier("hit_blocks", tier), 0)
            assert figure(browser, tier, "hits") == f"{hits:,.0f}"
        share = gauges["kvtier_cpu_resident_blocks"] / gauges["kvtier_cpu_slots"]
        capacity = as_size(gauges["kvtier_cpu_slots"] * status["block_bytes"])
        assert figure(browser, "host", "room") == f"{round(100 * share)} % of {capacity} in use"
        loaded = counters["kvtier_cpu_loaded_blocks"]
        tokens = {
            source: counters.get(f'kvtier_prompt_tokens{{source="{source}"}}', 0)
            for source in ("device", "host", "0:disk", "1:fs", "computed")
        }
        assert tokens["0:disk"] > 0
        found = 1 - tokens["computed"] / sum(tokens.values())
        assert browser.text("#share-all b") == f"{round(100 * found)} %"
        engine.end()
        browser.wait_for("document.getElementById('state').dataset.state == 'gone'")
        assert "The engine has ended" in browser.text("#banner")
        assert figure(browser, "host", "loaded") == f"{loaded:,.0f}"


@pytest.fixture
def told(run_dir: Path) -> Iterator[ToldEngine]:
    """An engine about which everything is known."""
    with ToldEngine() as told:
        fill(told)
        yield told


def fill(told: ToldEngine) -> None:
    told.counters = {
        "kvtier_cpu_stored_blocks": 1_234_567,
        "kvtier_cpu_loaded_blocks": 765_433,
        of_tier("bytes", "0:disk", "direction", "load"): 7e12,
        of_tier("declined_blocks", "0:disk", "reason", "slower"): 4321,
        of_tier("not_stored_blocks", "0:disk", "reason", "left_out"): 17,
        of_tier("failed_blocks", "1:fs", "direction", "store"): 99,
    }
    told.gauges = {
        "kvtier_cpu_resident_blocks": 50,
        of_tier("used_bytes", "0:disk"): 999 * BLOCK_BYTES,
        of_tier("used_bytes", "1:fs"): 3e9,
        of_tier("capacity_bytes", "1:fs"): 4e9,
        of_tier("breaker_state", "0:disk", "direction", "load"): 1,
        of_tier("breaker_state", "0:disk", "direction", "store"): 1,
        of_tier("breaker_state", "1:fs", "direction", "load"): 0,
        of_tier("breaker_state", "1:fs", "direction", "store"): 2,
    }
    told.requests = [REQUEST, {**REQUEST, "id": 20 * "long-", "started_s": None}]
    told.history = [
        (
            told.now_s - 3600 + 10 * n,
            {
                "kvtier_cpu_loaded_blocks": 3.0 * n,
                "kvtier_cpu_stored_blocks": 1.0 * n,
                "kvtier_cpu_resident_blocks": n / 3.6,
                of_tier("bytes", "0:disk", "direction", "load"): 5e9 * n,
                of_tier("seconds_count", "0:disk", "direction", "load"): 10.0 * n,
                of_tier("seconds_sum", "0:disk", "direction", "load"): 0.2 * n,
            },
        )
        for n in range(361)
    ]


CONTRAST = """
(() => {
  const channels = (colour) => {
    const canvas = document.createElement('canvas').getContext('2d');
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b]
    .map((c) => c / 255).map((c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, n) => sum + c * [.2126, .7152, .0722][n], 0);
  const ground = (element) => {
    for (let its = element; its; its = its.parentElement) {
      const colour = channels(getComputedStyle(its).backgroundColor);
      if (colour[3]) return colour;
    }
    return channels(getComputedStyle(document.documentElement).backgroundColor);
  };
  const ratio = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + .05) / (b + .05);
  };
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const style = getComputedStyle(element);
    const says = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!element.getClientRects().length) continue;
    const note = (what, colour, least) =>
      found.push([what, ratio(channels(colour), ground(element)), least]);
    if (element.matches('svg text')) note(element.textContent, style.fill, 4.5);
    else if (element.matches('svg path')) note('a line', style.stroke, 3);
    else if (says) note(element.textContent, style.color, 4.5);
  }
  return [light(ground(document.body)), found];
})()
"""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_everything_can_be_read(browser: Page, told: ToldEngine, scheme: str) -> None:
    with served(browser) as (_, host, port):
        browser.prefer(scheme)
        browser.open(f"http://{host}:{port}/")
        ground, found = browser.js(CONTRAST)
    assert len([text for text, _, least in found if least == 4.5]) > 60
    assert len([text for text, _, least in found if least == 3]) >= 5
    assert [each for each in found if each[1] < each[2]] == []
    assert (ground < 0.1) == (scheme == "dark")


@pytest.mark.parametrize("width", [320, 400, 1400])
def test_it_fits_every_width(browser: Page, told: ToldEngine, width: int) -> None:
    told.tiers = [{**each, "type": "x"} for each in told.tiers]
    with served(browser) as (_, host, port):
        browser.resize(width)
        browser.open(f"http://{host}:{port}/")
        assert browser.js("document.documentElement.scrollWidth") <= width
        assert browser.js("document.querySelectorAll('svg path').length") >= 5


def test_charts_show_the_last_hour_and_can_be_read_with_the_keyboard(
    browser: Page, told: ToldEngine
) -> None:
    with served(browser) as (_, host, port):
        browser.open(f"http://{host}:{port}/")
        shown = {
            name: browser.text(f'[data-chart="{name}"] .legend')
            for name in ("loaded_share", "loads", "used", "load_seconds")
        }
        assert "loaded 75 %" in shown["loaded_share"]
        assert f"host {as_size(0.3 * BLOCK_BYTES)}/s" in shown["loads"]
        assert f"0:disk {as_size(5e8)}/s" in shown["loads"]
        assert "host 100 %" in shown["used"]
        assert "0:disk 20 ms" in shown["load_seconds"]
        browser.js("document.querySelector('[data-chart=used] svg').focus()")
        browser.press("Home")
        assert "host 1 %" in browser.text('[data-chart="used"] .legend')
        label = browser.js("document.querySelector('[data-chart=used] svg').ariaLabel")
        assert "Room in use, the last hour" in label
        assert "host 1 %" in label
        browser.press("Escape")
        assert "host 100 %" in browser.text('[data-chart="used"] .legend')
        focusable = "document.querySelectorAll('a, button, [tabindex=\"0\"]').length"
        assert browser.js(focusable) >= 6


def test_where_prompts_came_from_and_what_that_gave(browser: Page, told: ToldEngine) -> None:
    tokens = {
        f'kvtier_prompt_tokens{{source="{source}"}}': count
        for source, count in {"device": 20, "host": 30, "0:disk": 10, "computed": 40}.items()
    }
    told.counters |= tokens | {'kvtier_saved_prefill_seconds{source="host"}': 7500}
    told.history = [
        (when, values | {series: count * n for series, count in tokens.items()})
        for n, (when, values) in enumerate(told.history)
    ]
    told.switches["share"] = 25.0
    with served(browser) as (_, host, port):
        browser.open(f"http://{host}:{port}/")
        assert browser.text("#share-all b") == "60 %"
        assert browser.text("#saved b") == "2 h 5 min"
        assert browser.text("#share b") == "25 %"
        legend = browser.text('[data-chart="tokens"] .legend')
        assert legend == "device 20 %host 30 %0:disk 10 %1:fs 0 %computed 40 %"
        assert browser.js("document.querySelector('[data-chart=loaded_share]').hidden")
        assert [each for each in browser.js(CONTRAST)[1] if each[1] < each[2]] == []


def test_reasons_troubles_and_breakers(browser: Page, told: ToldEngine) -> None:
    with served(browser) as (_, host, port):
        browser.open(f"http://{host}:{port}/")
        disk, fs = browser.text('[data-tier="0:disk"]'), browser.text('[data-tier="1:fs"]')
        assert "being tried" in disk
        assert "loads in use, stores cut off" in fs
        assert "declined: 4,321 slower" in disk
        assert "not stored: 17 left out" in disk
        assert "failed stores: 99" in fs
        assert "75 % of" in fs
        row = browser.text("#requests tr")
        assert row == "chatcmpl-1running6475 %host 32500 ms"
        meter = "document.querySelector('[data-tier=\"1:fs\"] [role=meter]').ariaValueNow"
        assert browser.js(meter) == "75"


def test_names_are_not_markup(browser: Page, run_dir: Path) -> None:
    evil = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    with ToldEngine(model=evil) as told, served(browser) as (_, host, port):
        told.requests = [{**REQUEST, "id": evil, "state": evil}]
        told.tiers = [*told.tiers, {**told.tiers[1], "tier": evil, "type": evil}]
        told.counters[of_tier("faults", evil, "kind", evil)] = 3
        browser.open(f"http://{host}:{port}/")
        assert evil in browser.text("h1")
        assert evil in browser.text("#requests")
        assert browser.js("document.querySelectorAll('img, main script').length") == 0
        assert "owned" not in browser.js("document.title").replace(evil, "")


def test_the_policy_stops_a_script_that_is_not_the_page(browser: Page, told: ToldEngine) -> None:
    with served(browser) as (_, host, port):
        browser.open(f"http://{host}:{port}/")
        browser.js(
            "(() => { const its = document.createElement('script');"
            "its.textContent = 'window.ran = true'; document.body.append(its); })()"
        )
        assert not browser.js("window.ran === true")
        refused = browser.js("fetch('http://127.0.0.1:1/').then(() => 'sent', () => 'refused')")
        assert refused == "refused"
    assert len(browser.complaints) >= 2
    assert all("Content Security Policy" in text for text in browser.complaints)
    browser.complaints.clear()


def test_what_is_wrong_is_said(browser: Page, run_dir: Path) -> None:
    def state(wanted: str) -> str:
        browser.wait_for(f"document.getElementById('state').dataset.state == '{wanted}'")
        return browser.text("#banner")

    with served(browser) as (process, host, port):
        browser.open(f"http://{host}:{port}/")
        assert "The page waits for one" in state("none")
        with ToldEngine() as told:
            told.counters = {}
            assert "No data yet" in state("empty")
            told.counters = {"kvtier_cpu_stored_blocks": 1}
            assert state("working") == ""
            told.idle_s = 90
            assert state("idle") == ""
            assert "last step 1 min ago" in browser.text("#state")
        assert "The engine has ended" in state("gone")
        process.kill()
        process.wait()
        assert "Is “kvtier page” still running?" in state("lost")
    assert all("ERR_" in text for text in browser.complaints)
    browser.complaints.clear()


def test_nothing_moves_for_those_who_prefer_that(browser: Page, told: ToldEngine) -> None:
    with served(browser) as (_, host, port):
        browser.prefer("light", motion="reduce")
        browser.open(f"http://{host}:{port}/")
        transition = "getComputedStyle(document.querySelector('.bar div')).transitionDuration"
        assert browser.js(transition) == "0s"
        browser.prefer("light")
        assert browser.js(transition) != "0s"


def test_a_hidden_page_asks_nothing(browser: Page, told: ToldEngine) -> None:
    with served(browser) as (_, host, port):
        browser.open(f"http://{host}:{port}/")
        browser.js(
            "Object.defineProperty(document, 'hidden', {get: () => true, configurable: true})"
        )
        time.sleep(0.3)  # an answer may be under way
        browser.js("1")
        before = len(browser.requests)
        time.sleep(1)  # five questions
        browser.js("1")
        assert len(browser.requests) == before
