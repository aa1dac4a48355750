"""The page in a headless browser: it draws, its filters work, and it makes neither errors nor requests."""

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import BEGAN, configuration, make_run, write_log

from rloo_pipeline.report.page import render
from rloo_pipeline.report.summary import summarize_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if BROWSER is None and os.environ.get("RLOO_REQUIRE_BROWSER"):
    raise RuntimeError("RLOO_REQUIRE_BROWSER is set and there is no chromium")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")

LISTEN = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message || event.target)), true);
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => errors.push("blocked " + event.blockedURI));
</script>"""
ACT = """<script>
const drawn = () => [...document.querySelectorAll(".plot")].filter((plot) => plot.querySelector("svg.main-svg")).length;
const look = (list) => ({
  shown: [...document.querySelectorAll(`#${list} [data-kind]:not([hidden])`)].map((item) => item.dataset.kind),
  groups: document.querySelectorAll(`#${list} article:not([hidden])`).length,
  count: document.querySelector(`.tools[data-list=${list}] output`).value,
});
const choose = (list, kind, word) => {
  const tools = document.querySelector(`.tools[data-list=${list}]`);
  const [select, input] = [tools.querySelector("select"), tools.querySelector("input")];
  select.value = kind;
  select.dispatchEvent(new Event("change"));
  input.value = word;
  input.dispatchEvent(new Event("input"));
  return look(list);
};
const wait = setInterval(() => {
  if (drawn() < document.querySelectorAll(".plot").length) return;
  clearInterval(wait);
  const tall = document.documentElement.scrollHeight;
  const open = [...document.querySelectorAll("details:not([open])")];
  for (const one of open) one.open = true;
  document.querySelector(".case .role").textContent = "tool_of_a_long_name_".repeat(20);
  const opened = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const wide = [...document.querySelectorAll(".wide")];
  const cards = wide.filter((card) => card.querySelector("table"));
  const cut = cards.filter((card) => card.scrollWidth > card.clientWidth + 1).length;
  for (const one of open) one.open = false;
  scrollTo(0, document.body.scrollHeight / 2);
  const main = document.querySelector("main");
  main.style.width = "360px";
  const sentences = [...document.querySelectorAll("p, h1")];
  const beyond = sentences.filter((text) => text.scrollWidth > text.clientWidth + 1).length;
  main.style.width = "";
  const nav = document.querySelector("nav").getBoundingClientRect().top;
  const result = {
    tall, beyond, opened, tables: cards.length, cut, nav,
    unreached: wide.filter((card) => card.scrollWidth > card.clientWidth && card.tabIndex < 0).length,
    part: document.querySelector("nav [aria-current]").getAttribute("aria-current"),
    script: getComputedStyle(document.querySelector(".case pre")).unicodeBidi,
    plots: drawn(),
    jobs: [...document.querySelectorAll("#plot-timeline .point path")]
      .filter((bar) => bar.getBBox().width + parseFloat(getComputedStyle(bar).strokeWidth) > 0).length,
    all: look("cases"), wrong: choose("cases", "wrong", ""), word: choose("cases", "", "14+<b>14</b>"),
    none: choose("cases", "", "no such word"),
    up: choose("groups", "up", ""), last: choose("groups", "right", "round 40"),
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
    errors,
  };
  const place = document.createElement("pre");
  place.id = "result";
  place.textContent = JSON.stringify(result);
  document.body.append(place);
}, 50);
</script>"""


def opened(page: str, folder: Path, width: int) -> tuple[str, str]:
    """The page after its scripts, and the browser's console."""
    file = folder / f"page-{width}.html"
    file.write_text(page)
    options = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=30000"),
        *(f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr"),
    )
    outcome = subprocess.run(
        [str(BROWSER), *options, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    return outcome.stdout, "\n".join(line for line in outcome.stderr.splitlines() if "CONSOLE" in line)


def browse(page: str, folder: Path, width: int) -> tuple[dict[str, Any], str]:
    """The result of `ACT` on the page, and the browser's console."""
    page = page.replace("<head>", "<head>" + LISTEN, 1).replace("</body>", ACT + "</body>", 1)
    shown, console = opened(page, folder, width)
    [result] = re.findall(r'<pre id="result">(.*?)</pre>', shown, re.DOTALL)
    return json.loads(unescape(result)), console


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = configuration().only("report")
    run = make_run(tmp_path_factory.mktemp("results") / "synthetic", config)
    write_log(run, "gate/00001.log", f"{BEGAN},123 INFO rloo.time: took 0.0 s\n")
    return render(config, run, summarize_run(config, run))


@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_works_in_a_browser(page: str, tmp_path: Path, width: int) -> None:
    result, console = browse(page, tmp_path, width)
    assert console == ""
    assert (result["errors"], result["requests"]) == ([], [])
    assert result["opened"] <= 0, "also with the name of a tool that a model made up"
    assert result["plots"] == page.count('class="plot"') >= 14
    assert result["wide"] <= 0, "nothing sticks out sideways"
    assert result["jobs"] == 4, "the shortest job is drawn too"
    assert result["beyond"] == 0, "on a phone no sentence sticks out"
    assert result["tables"] >= 6
    assert result["cut"] == 0, "no table loses a column"
    assert result["unreached"] == 0, "the keyboard scrolls the picture of the stages"
    assert result["tall"] < 8000, "rollouts are folded"
    assert (result["nav"], result["part"]) == (0, "true"), "the navigation stays, and says where one is"
    assert result["script"] == "plaintext", "Arabic runs from right to left"
    assert (len(result["all"]["shown"]), result["all"]["count"]) == (20, "20 of 20")
    wrong = result["wrong"]["shown"]
    assert 0 < len(wrong) < 20
    assert all("wrong" in kind.split() for kind in wrong)
    assert (len(result["word"]["shown"]), result["none"]["shown"]) == (1, [])
    assert result["up"]["shown"]
    assert all("up" in kind.split() for kind in result["up"]["shown"])
    assert 0 < len(result["last"]["shown"]) < len(result["up"]["shown"])
    assert result["last"]["groups"] <= 6, "groups without a completion to show are hidden"


def test_a_tablet_shows_every_column(page: str, tmp_path: Path) -> None:
    result, _ = browse(page, tmp_path, 768)
    assert (result["cut"], result["opened"], result["wide"]) == (0, 0, 0)


def test_an_old_browser_says_why_there_are_no_curves(page: str, tmp_path: Path) -> None:
    old = page.replace("<head>", "<head><script>delete window.DecompressionStream</script>", 1)
    shown, _ = opened(old, tmp_path, 1200)
    assert len(re.findall(r'class="plot"[^>]*>This browser cannot draw the curve', shown)) == page.count('class="plot"')


def test_errors_and_requests_are_detected(page: str, tmp_path: Path) -> None:
    broken = page.replace("</main>", '<img src="http://x.invalid/y.png"></main><script>undefined.field</script>', 1)
    result, console = browse(broken, tmp_path, 1200)
    assert any("field" in message for message in result["errors"])
    assert any("x.invalid" in message for message in result["errors"])
    assert "Content Security Policy" in console
