"""The page about asynchronous runs: ages of tokens, the queue, engines beside the trainer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from tests.support.made_up_run import make_up_run
from verl.plugins.view.ages import ages_of
from verl.plugins.view.curves import Curve
from verl.plugins.view.timeline import chrome_trace, spans_of

AGE = "training/off_policy/tokens_by_age"
SPANS = {  # the engines serve until the trainer asks for new weights; a lag's batch is sampled in the step before
    1: [["gen", 0.0, 4.0], ["engines", 1.0, 9.0], ["step", 0.0, 10.0]],
    2: [["gen", 10.0, 12.0], ["engines", 9.0, 11.0], ["engines", 12.0, 19.0], ["step", 10.0, 20.0]],
    3: [["gen", 14.0, 18.0], ["wait_prev_gen", 20.0, 21.0], ["step", 20.0, 30.0]],
}
SHARES = {1: [1.0], 2: [0.25, 0.75], 3: [0.5, 0.0, 0.5]}


def add_async_metrics(log: Path) -> None:
    """Add to each step of a run its shares of tokens by age, its queue and its staleness."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        shares = SHARES[line["step"]]
        line["data"] |= {f"{AGE}/{age}": share for age, share in enumerate(shares)}
        line["data"] |= {"async/groups/running": 8 - line["step"], "async/groups/finished": line["step"]}
        line["data"]["training/off_policy/trajectory_staleness/mean"] = line["step"] / 2
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_of_a_step_that_was_made_again_the_ages_of_the_later_one_count():
    def curve(*points: tuple[int, float, float]) -> Curve:
        return Curve(*(np.array(column, dtype=float) for column in zip(*points, strict=True)))

    curves = {  # step 2 had ages to 2 at first, and only age 0 after the resumption
        f"{AGE}/0": curve((1, 10.0, 1.0), (2, 20.0, 0.5), (2, 30.0, 1.0), (3, 40.0, 0.25)),
        f"{AGE}/10": curve((3, 40.0, 0.75)),
        f"{AGE}/2": curve((2, 20.0, 0.5)),
        "training/off_policy/evicted_samples": curve((1, 10.0, 7.0)),
    }
    last = {"step": 3, "shares": [0.25, *[0.0] * 9, 0.75]}
    assert ages_of(curves, None, None) == [{"step": 1, "shares": [1.0]}, {"step": 2, "shares": [1.0]}, last]
    assert ages_of(curves, 2, 2) == [{"step": 2, "shares": [1.0]}]
    old = {f"{AGE}/{age}": curve((1, math.nan, 0.5)) for age in (0, 1)}  # without times
    assert ages_of(old, None, None) == [{"step": 1, "shares": [0.5, 0.5]}]


def test_what_engines_did_beside_the_stages_is_cut_to_the_steps_and_no_stage():
    events = [{"event": "step", "step": step, "spans": spans} for step, spans in SPANS.items()]
    steps = spans_of(events, None, None)
    assert [[(span["name"], span["begin"], span["seconds"]) for span in step["beside"]] for step in steps] == [
        [("engines", 1.0, 8.0), ("engines", 9.0, 1.0)],  # the second goes on in step 2, which records it
        [("engines", 10.0, 1.0), ("engines", 12.0, 7.0), ("gen", 14.0, 4.0)],
        [],
    ]
    assert [[span["name"] for span in step["spans"]] for step in steps] == [
        ["step", "gen"], ["step", "gen"], ["step", "wait_prev_gen"]
    ]  # fmt: skip
    assert spans_of(events, 2, 2) == [steps[1]]
    trace = chrome_trace("run", steps)["traceEvents"]
    assert [(event["ts"], event["dur"]) for event in trace if event.get("tid") == 2] == [
        (1_000_000, 8_000_000), (9_000_000, 1_000_000), (10_000_000, 1_000_000), (12_000_000, 7_000_000),
        (14_000_000, 4_000_000),
    ]  # fmt: skip
    assert spans_of([{"event": "step", "step": 1, "spans": []}], None, None) == [{"step": 1, "spans": [], "beside": []}]


def test_an_asynchronous_run_shows_ages_queue_and_staleness_and_another_does_not(serve, open_view, tmp_path):
    log = make_up_run(tmp_path / "free", steps=3, prompts=1, siblings=1)
    add_async_metrics(log)
    events = log.with_name("metrics.run.jsonl")
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    lines = [line | {"spans": SPANS[line["step"]]} if line["event"] == "step" else line for line in lines]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_up_run(tmp_path / "plain", steps=3, prompts=1, siblings=1)
    tab = open_view(serve(tmp_path))
    page = tab.page
    page.locator("#runs li").nth(1).wait_for()
    page.keyboard.press("3")
    page.locator("#runs li", has_text="free").locator("button.only").click()
    steps = page.locator(".ages .timeline").get_by_role("listitem")
    steps.nth(2).wait_for()
    assert steps.evaluate_all("all => all.map((one) => one.ariaLabel)") == [
        "Step 1: 100 % of age 0", "Step 2: 25 % of age 0, 75 % of age 1", "Step 3: 50 % of age 0, 50 % of age 2",
    ]  # fmt: skip
    assert steps.nth(2).inner_text().split() == ["3", "mean", "1"]  # 0.5 · 0 + 0.5 · 2
    bars = steps.nth(1).locator(".span").evaluate_all("all => all.map((one) => [one.style.left, one.style.width])")
    assert bars == [["0%", "25%"], ["25%", "75%"]]
    charts = page.locator(".ages .uplot")
    assert charts.evaluate_all("all => all.map((one) => one.ariaLabel)") == [
        "Groups in the queue. running: 3 points, from 7 to 5; finished: 3 points, from 1 to 3",
        "Updates between sampling and training. newest token, mean: 3 points, from 0.5 to 1.5",
    ]
    lanes = page.locator("main .beside")
    assert [lanes.nth(step).locator(".span").count() for step in range(lanes.count())] == [2, 3]
    page.get_by_role("button", name="Ranks of step 1").click()
    page.locator(".lanes").get_by_role("listitem", name="sampling: engines 8 s, engines 1 s").wait_for()
    page.locator("#runs li", has_text="plain").locator("button.only").click()
    page.locator("main .of", has_text="plain").wait_for()
    page.locator("main[aria-busy=false]").wait_for()
    assert page.locator(".ages").inner_text() == ""
    assert page.locator(".timeline .step").count() > 0
    assert page.locator("main .beside").count() == 0
