"""The pages in a real browser: every view, by mouse and keyboard, in both themes, small and large; hostile names."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from urllib.parse import quote

import pytest

from megascale.core import strict_json
from megascale.observe.plots import smooth
from tests.observe.dashboard.conftest import EVIL, JOB, SLOW
from tests.observe.dashboard.test_expert_loads import write_counts

pytestmark = pytest.mark.xdist_group("browser")
# Axe's rules that look at colours, of those that it applies unless it is told otherwise.
COLOURS = ["color-contrast", "link-in-text-block"]
HEAT = "**/api/heat?**"
VIEWS = ("fleet", "overview", "heatmap", "timeline", "grid", "nodes", "plan")


def settled(page, address: str, view: str, **arguments: object) -> None:
    """Open a view and wait for its first answer."""
    requested = "&".join(f"{name}={quote(str(value))}" for name, value in arguments.items())
    page.goto(f"{address}{view}?{requested}")
    page.wait_for_selector("main[data-ready]")


def violations(page, **options: object) -> list[str]:
    """Rules of WCAG 2.1 AA and of good practice that the page breaks, with where."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    result = axe.Axe().run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
    return [
        f"{item['id']}: {node['html'][:200]} {node['failureSummary'][:200]}"
        for item in result
        for node in item["nodes"]
    ]


def test_views_keep_the_rules_of_accessibility(page, address):
    """All rules in the colours that a view was loaded in, light or dark in turn; those of colour in the others."""
    schemes = ["light", "dark"]
    for view in VIEWS:
        page.emulate_media(color_scheme=schemes[0])
        settled(page, address, view, run="calm")
        assert violations(page) == [], view
        schemes.reverse()
        page.emulate_media(color_scheme=schemes[0])
        assert violations(page, runOnly={"type": "rule", "values": COLOURS}) == [], view


def test_the_link_with_the_token_opens_the_page_and_leaves_the_address(page, serve, runs, tmp_path):
    file = tmp_path / "token"
    address = serve(runs / "calm", "--token-file", str(file))
    page.goto(address)
    page.get_by_label("token").wait_for()
    page.goto(f"{address}overview#token={'x' * 64}")
    page.reload()
    page.get_by_label("token").wait_for()
    page.goto(f"{address}heatmap?run=calm#token={file.read_text()}")
    page.reload()
    page.wait_for_selector("main[data-ready]")
    assert page.url == f"{address}heatmap?run=calm"
    page.reload()  # the tab keeps it
    page.wait_for_selector("main[data-ready]")


def test_front_page_lists_all_runs_and_filters_them(page, address):
    page.goto(address)
    page.wait_for_selector("main[data-ready]")
    rows = page.locator("section[aria-label=runs] tbody tr")
    assert rows.count() == 4
    assert "40.0%" in rows.filter(has_text="calm").inner_text()  # step 200 of 500
    page.get_by_label("filter runs").fill("calm")
    assert rows.count() == 1
    assert "filter=calm" in page.url
    page.get_by_label("filter runs").fill("")
    page.get_by_role("button", name="run", exact=True).click()
    names = rows.locator("td:first-child").all_inner_texts()
    assert names == sorted(names, key=str.lower)
    page.get_by_label("State").select_option("ended")
    assert rows.all_inner_texts() == ["No run matches."]
    page.get_by_label("State").select_option("all")
    page.get_by_role("link", name="calm", exact=True).click()
    page.wait_for_url(lambda url: "/overview?run=calm" in url)
    page.wait_for_selector(".tiles .tile.now")


def test_overview_shows_several_runs_over_each_other(page, address):
    page.goto(f"{address}overview?run=calm&run=other")
    page.wait_for_selector("main[data-ready]")
    assert page.locator(".legend[aria-label=runs] li").all_inner_texts() == ["calm", "other"]
    loss = page.locator("figure", has=page.locator("figcaption span", has_text="loss")).first.locator("canvas")
    label = loss.get_attribute("aria-label")
    assert label.startswith("loss.")
    assert "calm: last" in label
    assert "other: last" in label
    assert page.locator(".tile", has_text="effective time").locator("b").inner_text().endswith("%")
    assert "training" in page.locator(".figures").first.inner_text()
    assert page.locator("text=The run folder holds no checkpoint").is_visible()
    # Drag over a part of it: all charts show that part, and so does the address.
    box = loss.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_url(lambda url: "low=" in url and "high=" in url)
    page.get_by_role("button", name="Whole run").click()
    page.wait_for_url(lambda url: "low=" not in url)
    # The keyboard does the same.
    loss.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".told:visible")
    page.keyboard.press("+")
    page.wait_for_url(lambda url: "low=" in url)


def test_new_steps_and_events_come_by_themselves(page, serve, tmp_path):
    run = tmp_path / "live"
    run.mkdir()
    (run / "metrics.jsonl").write_text(strict_json.dumps({"step": 1, "loss": 5.0, "time": 1.0, "seconds": 1.0}) + "\n")
    page.goto(serve(run))
    page.wait_for_selector(".chart canvas[aria-label*='last 5']")
    with open(run / "metrics.jsonl", "a") as out:
        out.write(strict_json.dumps({"step": 2, "loss": 4.0, "time": 2.0, "seconds": 1.0}) + "\n")
    page.wait_for_selector(".chart canvas[aria-label*='last 4']")
    (run / "events.jsonl").write_text(strict_json.dumps({"time": 3.0, "event": "run_finished", "attempt": 1}) + "\n")
    page.wait_for_selector(".events >> text=run finished")
    page.wait_for_selector(".chip >> text=done")


def test_nodes_are_asked_for_again_though_nothing_is_told(page, address):
    """A driver's answer holds for a second: what tells the page of a pause may come before the answer has it."""
    requested = []

    def answer(route) -> None:
        requested.append(route)
        job = {
            "phase": "pausing" if len(requested) < 3 else "paused",
            "attempt": 1,
            "step": 7,
            "world": 1,
            "nodes": ["n0"],
        }
        route.fulfill(json={"driver": True, "driver_error": "", "job": {**job, "data": 1, "why": ""}, "nodes": []})

    page.route("**/api/nodes?**", answer)
    settled(page, address, "nodes", run="calm")
    page.wait_for_selector("section[aria-label=job] b >> text=paused", timeout=20_000)
    assert page.get_by_role("button", name="Resume", exact=True).is_enabled()


def test_heat_map_leads_from_the_outlier_to_its_host_and_history(page, address):
    settled(page, address, "heatmap", run="calm")
    assert page.locator(".outliers button").first.inner_text().startswith(f"rank {SLOW}")
    page.locator(".outliers button").first.click()
    page.wait_for_url(lambda url: f"rank={SLOW}" in url)
    page.wait_for_selector("section[aria-label=history] canvas")
    assert "node-0000" in page.locator(f"section[aria-label='rank {SLOW}']").inner_text()
    assert page.locator("section[aria-label='ranks of the host'] button").count() == 8
    page.get_by_role("button", name="All outliers").click()
    # By keyboard: from cell to cell, and what each is said.
    page.locator("canvas[role=application]").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.locator("p[role=status].unseen").inner_text().startswith("rank ")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: "rank=" in url)
    # A link shows the same to every reader.
    page.get_by_label("Figure").select_option("wait.tensor")
    page.get_by_label("By", exact=True).select_option("grid")
    page.get_by_label("from step").fill("2")
    page.keyboard.press("Tab")
    choices = ("figure=wait.tensor", "order=grid", "first=2")
    page.wait_for_url(lambda url: all(choice in re.split("[?&]", url) for choice in choices))
    page.reload()
    page.wait_for_selector(".outliers button")
    assert page.get_by_label("Figure").input_value() == "wait.tensor"
    assert page.get_by_label("from step").input_value() == "2"


def hold_requests(page, pattern: str, actions: list[Callable[[], object]]) -> list:
    """Return the requests for `pattern` that the actions cause, one each; later ones go to the server."""
    held = []
    page.route(pattern, lambda route: held.append(route) if len(held) < len(actions) else route.continue_())
    for number, action in enumerate(actions, start=1):
        action()
        while len(held) < number:
            page.wait_for_timeout(10)  # takes the browser's messages
    return held


def test_an_answer_leaves_a_step_that_is_being_typed(page, address):
    settled(page, address, "heatmap", run="calm")
    held = hold_requests(page, HEAT, [lambda: page.get_by_label("Figure").select_option("wait.tensor")])
    step = page.get_by_label("from step")
    step.press("ControlOrMeta+a")
    step.press("1")
    scale = page.locator(".scale").inner_text()
    held[0].continue_()
    page.wait_for_function("text => document.querySelector('.scale').innerText !== text", arg=scale)
    assert step.input_value() == "1"
    assert step.evaluate("field => field === document.activeElement")
    assert not [part for part in re.split("[?&]", page.url) if part.startswith("first=")]  # not taken as typed so far
    page.keyboard.press("0")
    assert step.input_value() == "10"
    page.keyboard.press("Tab")
    page.wait_for_url(lambda url: "first=10" in re.split("[?&]", url))
    assert step.input_value() == "10"


def test_a_late_answer_does_not_replace_that_to_a_later_choice(page, address):
    settled(page, address, "heatmap", run="calm")
    figure = page.get_by_label("Figure")
    choices = [lambda: figure.select_option("wait.tensor"), lambda: figure.select_option("wait.pipeline")]
    held = hold_requests(page, HEAT, choices)
    for route in reversed(held):
        with page.expect_response(HEAT) as response:
            route.continue_()
        response.value.finished()
        page.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert figure.input_value() == "wait.pipeline"


STEPS = [{"step": s, "loss": 4 - s / 100, "seconds": 1 + s % 3 / 10, "time": s} for s in range(1, 101)]
EVALUATIONS = [{"step": s, "valid_loss": 3.5, "time": s + 0.5} for s in (40, 60)]


@pytest.fixture(scope="module")
def special(serve, tmp_path_factory) -> str:
    """Address of three runs: one that has only begun, one whose first step compiles for 40 s, one with a plan."""
    folder = tmp_path_factory.mktemp("special")
    compiled = [STEPS[0] | {"seconds": 40.0}] + STEPS[1:] + EVALUATIONS
    planned = [step | {"memory_gib": 30.0} for step in STEPS]
    for name, records in (("begun", []), ("compiled", compiled), ("planned", planned)):
        (folder / name).mkdir()
        (folder / name / "metrics.jsonl").write_text("".join(strict_json.dumps(line) + "\n" for line in records))
    (folder / "planned" / "config.toml").write_text(
        '[model]\npreset = "gpt-1.3b"\nvocab_size = 50304\n'
        '[train]\nsteps = 200\nmicro_batch = 1\nglobal_batch = 8\nprecision = "bfloat16"\n'
    )
    return serve(folder)


def evaluate(page, address: str, module: str, expression: str):
    """Return the value of an expression with a module of the pages as `m`."""
    settled(page, address, "overview", run="calm")
    return page.evaluate(f"import('/pages/{module}').then((m) => {expression})")


def test_an_unknown_run_is_named_with_the_runs_that_are_there(page, address):
    for view in ("overview", "plan"):
        settled(page, address, view, run="gone")
        text = page.locator("section[aria-label='unknown run']").inner_text()
        assert "There is no run gone in " in text
        assert "calm" in text
    assert violations(page) == []
    page.locator("main").get_by_role("link", name="calm", exact=True).click()
    page.wait_for_selector(".tiles .tile.now")
    assert "run=calm" in page.url


def test_views_without_data_teach_what_they_need(page, address, special):
    for view, title in (("timeline", "The timeline needs spans"), ("heatmap", "The heat map needs spans")):
        settled(page, address, view, run="other")
        assert page.get_by_role("heading", name=title).is_visible()
        assert page.locator(".canvas:visible").count() == 0
        assert violations(page) == []
    settled(page, address, "nodes", run="other")
    assert "megascale launch FILE --nodes 4 --spares 1" in page.locator(".teach").inner_text()
    settled(page, special, "overview", run="begun")
    assert "No step has ended yet" in page.locator(".charts .teach").inner_text()


def test_the_legend_of_the_timeline_is_above_it(page, address):
    settled(page, address, "timeline", run="calm")
    legend = page.locator("ul[aria-label=colours]").bounding_box()
    canvas = page.locator(".canvas canvas").bounding_box()
    assert legend["y"] + legend["height"] <= canvas["y"]


def test_charts_share_x_and_leave_the_first_step_out_of_y(page, special):
    """The first step compiles for 40 s: it is counted and not drawn, and the average begins after it."""
    settled(page, special, "overview", run="compiled")
    time_chart = page.locator("figure", has_text="step time")
    page.wait_for_function("document.body.innerText.includes('1 above')")
    assert time_chart.locator(".last").inner_text().endswith("· 1 above")
    # The held-out losses lie between steps 40 and 60; their chart has the x of the others.
    held_out = page.locator("figure", has_text="held-out loss").locator("canvas")
    box = held_out.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    page.wait_for_selector(".told:visible")
    told = time_chart.locator(".told b").inner_text()
    assert int(told) < 10
    page.get_by_label("Smoothing").select_option("0.9")
    page.wait_for_url(lambda url: "smooth=0.9" in url)
    page.reload()
    page.wait_for_selector("main[data-ready]")
    assert page.get_by_label("Smoothing").input_value() == "0.9"


# Presses, moves, and loses the pointer to the browser. The next move has no button pressed.
CANCELLED = """
(() => {
  const calls = [];
  const name = (kind) => (...values) => calls.push([kind, ...values]);
  const on = m.followPointer({hover: name("hover"), drag: name("drag"), click: name("click"), drop: name("drop")});
  const at = (x) => ({offsetX: x, offsetY: 0, pointerId: 1, currentTarget: {setPointerCapture() {}}});
  for (const distance of [9, 1]) {
    on.onpointerdown(at(0));
    on.onpointermove(at(distance));
    on.onpointercancel(at(distance));
    on.onpointermove(at(20));
  }
  return calls;
})()
"""


def test_a_pointer_that_the_browser_takes_ends_a_drag(page, address):
    calls = evaluate(page, address, "canvas.js", CANCELLED)
    assert calls == [["drag", 9, 0], ["drop"], ["hover", 20, 0], ["hover", 20, 0]]
    loss = page.locator("figure", has=page.locator("figcaption span", has_text="loss")).first.locator("canvas")
    box = loss.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    loss.dispatch_event("pointercancel")
    page.mouse.up()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    page.wait_for_selector(".told:visible")
    assert "low=" not in page.url


def test_averages_are_those_of_the_plot_command(page, address):
    values = [4.0, 1.0, 3.0, 2.0]
    drawn = evaluate(page, address, "line_chart.js", f"m.average({values}, 0.9)")
    assert drawn == pytest.approx(smooth(values, 0.9))
    assert evaluate(page, address, "line_chart.js", "m.average([1, null, 2], 0)") == [1, None, 2]
    # Of five values one may be outside; two as large ones are not.
    assert evaluate(page, address, "line_chart.js", "m.cut([1, 1, 1, 1, 1], [9, 1.1, 1, 1.2, 1])") == [1, 1.2]
    assert evaluate(page, address, "line_chart.js", "m.cut([1, 1, 1, 1, 1], [9, 9, 1, 1.2, 1])") == [1, 9]


def test_details_of_events_have_units(page, address):
    expected = {
        ("seconds", 0.25): "took 250 ms",
        ("bytes", 2048): "size 2 KiB",
        ("stall", 0.07): "stall 70 ms",
        ("save_seconds", 130): "save 2 min 10 s",
        ("valid_bits_per_byte", 0.5): "valid 0.5 bits per byte",
        ("loss", 2.5): "loss 2.5 nats per token",
        ("memory_gib", 3.25): "memory 3.25 GiB",
        ("tokens", 1234567): "tokens 1,234,567",
        ("path", "step-30"): "path step-30",
    }
    details = json.dumps([list(detail) for detail in expected])
    told = evaluate(page, address, "overview.js", f"{details}.map(([key, value]) => m.detail(key, value))")
    assert told == list(expected.values())


def test_plan_and_measurement_have_one_scale(page, special):
    """Bars of memory and of the step are as long as their values say."""
    settled(page, special, "plan", run="planned", cluster="h200-host")
    units = {"GiB": 1.0, "s": 1.0, "ms": 1e-3}
    for section in ("memory", "step"):
        lengths = {}
        for row in page.locator(f"section[aria-label={section}] .stage").all():
            name, (number, unit) = row.locator("> span").inner_text(), row.locator("b").inner_text().split()
            boxes = [part.bounding_box() for part in row.locator(".stripe span").all()]
            lengths[name] = (float(number) * units[unit], boxes[-1]["x"] + boxes[-1]["width"] - boxes[0]["x"])
        assert "measured" in lengths
        per_unit = [pixels / value for value, pixels in lengths.values()]
        assert max(per_unit) < 1.03 * min(per_unit), lengths
    assert "[object" not in page.locator("main").inner_text()


def test_the_overview_fits_a_phone(page, address):
    page.set_viewport_size({"width": 375, "height": 740})
    settled(page, address, "overview", run="calm")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert page.locator(".chart").first.bounding_box()["width"] > 300


def test_the_plan_fits_a_phone_with_whole_words(page, special):
    """Captions of columns wrap, and names of rows keep their words whole."""
    page.set_viewport_size({"width": 375, "height": 740})
    settled(page, special, "plan", run="planned")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    name = page.locator("section[aria-label=step] tbody tr", has_text="tokens per second").locator("th, td").first
    assert name.bounding_box()["height"] < 100  # at most a line per word


@pytest.mark.parametrize("width", [375, 1440])
def test_states_of_the_list_of_runs_keep_one_line(page, address, width):
    page.set_viewport_size({"width": width, "height": 740})
    settled(page, address, "fleet")
    page.wait_for_selector("section[aria-label=runs] .tag")
    heights = [tag.bounding_box()["height"] for tag in page.locator("section[aria-label=runs] .tag").all()]
    assert len(heights) == 4
    assert max(heights) < 25
    calm = page.get_by_role("link", name="calm", exact=True)
    assert calm.bounding_box()["height"] < 25
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_names_and_values_run_no_script(page, address, runs):
    (evil,) = [run.name for run in runs.iterdir() if run.name.startswith("<img")]
    for view in VIEWS:
        settled(page, address, view, run=evil)
        assert page.evaluate("window.hacked === undefined"), view
        assert page.locator("img, main script").count() == 0, view
    settled(page, address, "overview", run=evil)
    # It is shown, as text.
    assert EVIL[:30] in page.locator(".events").inner_text()
    assert page.locator(".picker summary").inner_text().endswith(evil)
    settled(page, address, "heatmap", run="calm", figure=EVIL)
    assert "this run has no such figure" in page.locator(".note").inner_text()
    assert page.evaluate("window.hacked === undefined")


def test_a_damaged_run_opens_and_says_what_is_missing(page, address):
    settled(page, address, "overview", run="damaged")
    assert page.locator(".chart canvas").count()
    notes = page.locator(".notes").inner_text()
    for word in ("metrics.jsonl could not be read", "events.jsonl cannot be read", "config.toml", "journal", "COMMIT"):
        assert word in notes, word
    for view in VIEWS[1:]:
        settled(page, address, view, run="damaged")
        assert page.locator(".note").first.inner_text()


def test_keys_lead_through_the_views(page, address):
    settled(page, address, "overview", run="calm")
    page.keyboard.press("h")
    page.wait_for_selector("h1 >> text=Heat map of calm")
    page.wait_for_selector("main[data-ready]")
    page.go_back()
    page.wait_for_selector(".chart canvas")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("d")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.keyboard.press("?")
    assert page.get_by_role("dialog", name="keys").is_visible()
    page.keyboard.press("Escape")
    page.locator(".picker summary").click()
    page.get_by_label("show other").check()
    page.wait_for_url(lambda url: url.count("run=") == 2)


def test_nothing_is_asked_of_the_internet(page, address):
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    settled(page, address, "heatmap", run="calm")
    assert requested
    assert all(url.startswith(address) for url in requested)
    assert json.loads(page.evaluate("JSON.stringify(performance.getEntriesByType('resource').length)")) >= JOB.stages


def test_the_overview_draws_the_loads_and_only_of_runs_with_experts(page, serve, tmp_path):
    counts = [[(layer * 7 + expert * 13) % 40 for expert in range(16)] for layer in range(6)]
    write_counts(tmp_path / "moe", {10: [[5] * 16] * 6, 20: counts})
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": time.time(), "loss": 1.0}) + "\n")
    address = serve(tmp_path)
    page.goto(f"{address}overview?run=moe")
    page.wait_for_selector("main[data-ready]")
    panel = page.locator("section[aria-label=experts]")
    assert "step 20" in panel.inner_text()
    assert panel.locator("tbody tr").count() == 6
    canvas = panel.locator("canvas")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "layer of experts 0, expert 1: 13 tokens" in panel.locator("p[role=status]").inner_text()
    panel.get_by_label("step of the heat map").press("Home")
    panel.get_by_text("step 10", exact=True).wait_for()
    page.goto(f"{address}overview?run=plain")
    page.wait_for_selector("main[data-ready]")
    assert page.locator("section[aria-label=experts]").is_hidden()
