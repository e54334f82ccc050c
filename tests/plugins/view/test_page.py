"""The page in a real Chromium: it loads, draws, filters, follows a live run, and survives hostile samples."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.made_up_run import make_up_run, metrics_line, write_samples
from verl.plugins.view.report import write_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_up_run(folder / "first", steps=45, tokens_every=9, validation_every=15)
    make_up_run(folder / "second", steps=30, seed=3)
    return folder


@pytest.fixture(scope="module")
def server(command, folder):
    return command(folder)


CHART = "figure[data-metric='critic/score/mean']"
COLOURS_OF_CHART = f"""() => {{
    const canvas = document.querySelector("{CHART} canvas");
    if (!canvas?.width) return [];
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set();
    for (let i = 0; i < pixels.length; i += 4) {{
        if (pixels[i + 3] > 200) colours.add(`${{pixels[i]}},${{pixels[i + 1]}},${{pixels[i + 2]}}`);
    }}
    return [...colours];
}}"""
"""The opaque colours of the chart; none before it is drawn."""
BLUE, ORANGE = "0,114,178", "213,94,0"


def test_curves_of_two_runs_are_drawn_and_smoothed(server, open_view):
    page = open_view(server).page
    page.locator("#runs li").nth(1).locator("input").check()
    both = f"(colours) => colours.every((one) => ({COLOURS_OF_CHART})().includes(one))"
    page.wait_for_function(both, arg=[BLUE, ORANGE])
    assert "45 points" in page.locator(f"{CHART} .uplot").get_attribute("aria-label")
    before = page.locator(f"{CHART} canvas").evaluate("canvas => canvas.toDataURL()")
    page.locator("input[type=range]").fill("0.9")
    page.wait_for_function(
        f"""before => {{
            const now = document.querySelector("{CHART} canvas");
            return now && ({COLOURS_OF_CHART})().length > 0 && now.toDataURL() !== before;
        }}""",
        arg=before,
    )
    # Reward, length, entropy, gradient, loss and time come first, and the legend has their last values.
    shown = page.locator(".group").first.locator("figure").evaluate_all("all => all.map((one) => one.dataset.metric)")
    assert shown == [
        "critic/score/mean", "response_length/mean", "response_length/clip_ratio", "actor/entropy", "actor/grad_norm",
        "actor/pg_loss", "timing_s/step",
    ]  # fmt: skip
    legend = page.locator("figure[data-metric='timing_s/step'] .u-legend")
    legend.locator(".u-series").nth(2).wait_for()
    assert legend.locator(".u-value").all_inner_texts() == ["last", "10", "10"]
    page.fill("#search", "entropy")
    page.locator("figure.chart:only-child").wait_for()


def test_what_is_chosen_is_in_the_address_and_back_goes_back(serve, open_view, tmp_path):
    for number in range(3):
        make_up_run(tmp_path / f"run-seed{number}", steps=5, seed=number, prompts=1, siblings=2)
    tab = open_view(serve(tmp_path))
    page = tab.page
    page.get_by_role("button", name="all", exact=True).click()
    page.locator(f"{CHART} .u-series").nth(3).wait_for()
    looks = """all => Object.fromEntries(all.map((one) =>
        [one.querySelector(".name").textContent, one.querySelector(".line").style.background]))"""
    colours = page.locator("#runs li").evaluate_all(looks)
    page.get_by_label("pin actor/pg_loss").click()
    page.locator(".group", has_text="Pinned").locator("figure[data-metric='actor/pg_loss']").wait_for()
    page.get_by_text("mean over seeds").click()
    page.locator(f"{CHART} .u-label", has_text="run, mean of 3").wait_for()
    page.locator("section", has_text="Runs by settings").get_by_role("row", name="run, mean of 3").wait_for()
    make_up_run(tmp_path / "another", steps=2)
    page.locator("#runs li").nth(3).wait_for()
    page.reload()  # a copy of the address in another tab
    page.locator(f"{CHART} .u-label", has_text="run, mean of 3").wait_for()
    assert page.locator("figure.chart").first.get_attribute("data-metric") == "actor/pg_loss"
    assert page.locator("#runs input:checked").count() == 3
    assert colours.items() <= page.locator("#runs li").evaluate_all(looks).items()

    page.get_by_role("link", name="Samples").click()
    page.locator("tr[data-sample]").nth(3).locator("button").click()
    page.locator(".one h2").wait_for()
    opened = page.url
    page.go_back()
    page.locator("tr[data-sample]").first.wait_for()
    page.locator(".one h2").wait_for(state="detached")
    page.go_forward()
    page.locator(".one h2").wait_for()
    assert page.url == opened
    page.go_back()
    page.locator(".one h2").wait_for(state="detached")
    page.go_back()
    page.locator(f"{CHART} .u-label", has_text="run, mean of 3").wait_for()
    assert page.locator("input[name=averages]").is_checked()
    page.keyboard.press("2")
    page.locator("tr[data-sample]").first.wait_for()
    page.get_by_role("link", name="Runs").click()  # as it was left
    page.locator(f"{CHART} .u-label", has_text="run, mean of 3").wait_for()


def test_a_run_of_one_step_shows_what_is_not_finite_and_what_the_reward_function_read(serve, open_view, tmp_path):
    log = make_up_run(tmp_path, steps=1, prompts=1, siblings=1)
    line = json.loads(log.read_text())
    line["data"]["actor/pg_loss"] = None
    log.write_text(json.dumps(line) + "\n")
    samples = tmp_path / "rollouts/1.jsonl"
    samples.write_text(json.dumps(json.loads(samples.read_text()) | {"columns": {"label": "sixteen"}}) + "\n")
    page = open_view(serve(tmp_path)).page
    plot = page.locator("figure[data-metric='actor/pg_loss'] .uplot")
    assert plot.get_attribute("aria-label").endswith("0 points, from – to –, 1 not finite")
    page.keyboard.press("2")
    page.locator("tr[data-sample] button").first.click()
    page.get_by_role("heading", name="Columns that the reward function read").wait_for()
    page.locator(".one dd").get_by_text("sixteen").wait_for()


@pytest.mark.slow
def test_forty_runs_have_forty_lines(serve, open_view, tmp_path):
    for number in range(40):
        make_up_run(tmp_path / f"run{number:02}", steps=2, metrics=0, prompts=1, siblings=1)
    page = open_view(serve(tmp_path)).page
    page.get_by_role("button", name="all", exact=True).click()
    looks = page.locator("#runs .line").evaluate_all("all => all.map((one) => one.style.background)")
    assert len(set(looks)) == 40
    markers = page.locator("figure[data-metric='critic/score/mean'] .u-marker")
    page.wait_for_function(
        "n => document.querySelectorAll(\"figure[data-metric='critic/score/mean'] .u-marker\").length === n", arg=41
    )
    assert markers.evaluate_all("all => all.map((one) => one.style.background)")[1:] == looks
    assert page.locator("figure[data-metric='critic/score/mean'] .u-marker").nth(9).bounding_box()["height"] == 3


def test_one_question_answers_for_several_runs_and_metrics(server):
    keys = [run["id"] for run in server.get("/api/runs").json()["runs"]]
    names = ["critic/score/mean", "actor/entropy"]
    together = server.get("/api/series", run=keys, name=names).json()
    ask = [(key, name, server.get("/api/series", run=key, name=name).json()) for key in keys for name in names]
    assert together == {key: {name: one[key][name] for at, name, one in ask if at == key} for key in keys}
    assert sorted(len(together[key][name]["values"]) for key in keys for name in names) == [30, 30, 45, 45]
    first, second = (together[key]["actor/entropy"]["values"] for key in keys)
    assert first[:30] != second[:30]
    details = server.get("/api/details", run=keys).json()
    assert {key: one["id"] for key, one in details.items()} == dict(zip(keys, keys, strict=True))
    assert server.get("/api/series", run=[*keys, "gone"], name=names).status_code == 404


@pytest.mark.slow
def test_all_runs_are_chosen_by_one_click_and_asked_for_by_one_question(server, open_view):
    tab = open_view(server)
    page = tab.page
    page.locator("figure[data-metric='critic/score/mean'] canvas").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/api/" in request.url else None)
    page.get_by_role("button", name="all", exact=True).click()
    page.locator("[aria-label*='critic/score/mean'][aria-label*='45 points'][aria-label*='30 points']").wait_for()
    assert sum("/api/details" in url for url in asked) == 1
    assert [url.count("run=") for url in asked if "series?" in url and "name=critic%2Fscore%2Fmean" in url] == [2]
    page.get_by_role("button", name="none", exact=True).click()
    page.locator("main").get_by_text("No run is chosen").wait_for()
    for view in ("Samples", "Time", "Health", "Runs"):
        page.get_by_role("link", name=view).click()
        page.reload()  # that none is chosen is in the address too
        page.locator("main").get_by_text("No run is chosen").wait_for()
    page.get_by_label("Find a run").fill("SECOND")
    page.get_by_role("button", name="all", exact=True).click()
    page.locator(".choices").get_by_text("1 of 2").wait_for()
    page.locator("main h2", has_text="About second").wait_for()


def test_legends_say_what_differs_and_a_click_on_runs_stays_at_the_top(serve, open_view, tmp_path):
    for name in ("qwen3-grpo-lr1e-6", "qwen3-grpo-lr10e-6"):
        make_up_run(tmp_path / name, steps=2)
    page = open_view(serve(tmp_path), color_scheme="dark").page
    page.get_by_role("button", name="all", exact=True).click()
    labels = page.locator("figure[data-metric='critic/score/mean'] .u-series .u-label")
    page.locator("[aria-label*='critic/score/mean'][aria-label*=';']").wait_for()
    assert sorted(labels.all_inner_texts()) == ["step", "…lr10e-6", "…lr1e-6"]
    page.get_by_role("link", name="Samples").click()
    page.locator("tr[data-sample]").first.wait_for()
    page.get_by_role("link", name="Runs").click()
    page.locator(f"{CHART} .uplot").wait_for()
    assert page.evaluate("() => scrollY") == 0  # the browser would scroll to what is called like the address


def test_a_run_that_comes_into_an_empty_folder_is_shown_with_how_its_starts_ended(serve, open_view, tmp_path):
    tab = open_view(serve(tmp_path, has_runs=False))
    page = tab.page
    page.locator("main").get_by_text("There is no run in these folders yet").wait_for()
    start = {"event": "start", "config": {"a": 1}, "host": "elsewhere", "time": 1, "pid": 1}
    ends = [{"event": "end", "status": "stopped", "why": why, "time": 2} for why in ("SIGTERM", "SIGINT")]
    events = [start, ends[0], start, ends[1]]
    (tmp_path / "metrics.run.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page.locator("main h2", has_text="About").wait_for()
    assert page.locator("main .note").all_inner_texts() == ["an earlier start ended: SIGTERM"]
    assert page.locator("main .why").all_inner_texts() == ["ended: SIGINT"]


def test_a_sample_that_is_opened_by_keys_says_why_its_trajectory_ended(serve, open_view, tmp_path):
    make_up_run(tmp_path / "run", steps=1, prompts=1, siblings=1)
    file = tmp_path / "run/rollouts/1.jsonl"
    conversation = [
        {"role": "user", "content": "make 16"},
        {"role": "assistant", "content": "7 + 12", "began": 100.0, "seconds": 2.0},
        {"role": "tool", "name": "sum", "content": "19", "began": 102.0, "seconds": 1.0},
        {"role": "assistant", "content": "then", "began": 104.0, "seconds": 4.0, "environment_seconds": 2.0},
    ]
    trajectory = {"status": "timeout", "message": "it took longer than 9 s", "conversation": conversation}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"trajectory": trajectory}) + "\n")
    page = open_view(serve(tmp_path)).page
    page.locator("figure canvas").first.wait_for()
    page.keyboard.press("2")
    page.locator("tr[data-sample] button").focus()
    page.keyboard.press("Enter")
    page.locator(".one h2", has_text="timeout").wait_for()
    assert page.locator(".one .why").inner_text() == "it took longer than 9 s"
    assert page.locator(".one pre.truth").inner_text() == '{"target":16}'
    assert page.locator(".one pre").all_inner_texts()[1:] == ["make 16", "7 + 12", "19", "then"]  # the prompt once
    turns = page.get_by_role("list", name="Turns, 10 s in all").get_by_role("listitem")
    assert [turn.get_attribute("aria-label") for turn in turns.all()] == [
        "assistant: 2 s after 0 s", "tool sum: 1 s after 2 s", "assistant: 4 s after 4 s",
        "environment: 2 s after 8 s",
    ]  # fmt: skip
    bars = turns.locator(".span").evaluate_all("all => all.map((one) => [one.style.left, one.style.width])")
    assert bars == [["0%", "20%"], ["20%", "10%"], ["40%", "40%"], ["80%", "20%"]]


def test_the_first_link_leads_to_the_content_and_keys_of_views_work_among_tokens(server, open_view):
    tab = open_view(server)
    page = tab.page
    tab.show("samples")
    page.reload()
    page.locator("#runs li", has_text="first").locator("button.only").click()
    page.locator("p.count").get_by_text("of 720").wait_for()
    page.locator(".skip").press("Enter")
    assert page.evaluate("() => [document.activeElement.id, location.hash.split('?')[0]]") == ["main", "#samples"]
    page.keyboard.press("j")
    page.locator(".tokens[role=listbox]").focus()
    page.keyboard.press("3")
    page.locator(".timeline .step").first.wait_for()


def test_filters_choose_samples(server, open_view):
    tab = open_view(server)
    tab.show("samples")
    page = tab.page
    count = page.locator("p.count")
    count.get_by_text("of").wait_for()
    page.locator("#runs li", has_text="first").locator("button.only").click()
    count.get_by_text("of 720").wait_for()  # 45 steps of 4 prompts with 4 responses each
    page.locator("input[name=step_from]").fill("44")
    page.keyboard.press("Tab")
    count.get_by_text("32 samples, of 32").wait_for()
    page.locator("select[name=source]").select_option("gsm8k")
    count.get_by_text("16 samples, of 16").wait_for()
    page.locator("input[name=score_from]").fill("0.5")
    page.keyboard.press("Tab")
    page.locator("tbody tr").first.wait_for()
    page.wait_for_function("() => [...document.querySelectorAll('td.score')].every(cell => cell.textContent === '1')")
    page.locator("input[name=text]").fill("nothing says this")
    page.keyboard.press("Tab")
    page.get_by_text("No sample is like that.").wait_for()
    assert "step_from=44" in page.url


def test_a_sample_has_siblings_history_and_tokens_with_their_numbers(server, open_view):
    tab = open_view(server)
    tab.show("samples?kind=validation")
    page = tab.page
    page.locator("#runs li", has_text="first").locator("button.only").click()
    page.locator("select[name=kind]").select_option("validation")
    page.locator("p.count").get_by_text("of 12").wait_for()  # 3 validations of 4 prompts
    page.locator("tbody tr button").first.click()
    page.get_by_text("from step to step").wait_for()
    titles = [title.inner_text() for title in page.locator(".card button").all()]
    assert [title.split(":")[0] for title in titles] == ["step 15", "step 30", "step 45"]

    page.locator("select[name=kind]").select_option("train")
    page.locator("p.count").get_by_text("of 720").wait_for()
    page.keyboard.press("Escape")
    page.locator("tbody tr button").first.click()
    page.get_by_text("Siblings: 4").wait_for()
    tokens = page.locator(".token")
    tokens.first.wait_for()
    assert tokens.count() == 24
    assert page.locator(".token.others").count() == 4
    tokens.nth(2).hover()
    assert "3 of 24" in page.locator(".about-token").inner_text()
    page.mouse.move(0, 0)  # a token that is drawn anew under the pointer would be chosen by it
    page.locator("[role=listbox]").press("ArrowRight")
    about = page.locator(".about-token").inner_text()
    assert "4 of 24" in about
    assert {"advantage", "entropy", "weight version"} <= {line.strip() for line in about.splitlines()}
    colours = "() => new Set([...document.querySelectorAll('.token')].map(token => token.style.background)).size"
    assert page.evaluate(colours) > 5
    page.locator("select[name=colour]").select_option("mask")
    assert page.evaluate(colours) == 2
    page.locator("select[name=colour]").select_option("weight_versions")
    assert page.evaluate(colours) == 3  # the older and the newer weights, and what the policy did not draw
    page.locator("select[name=colour]").select_option("ratio")
    assert page.evaluate(colours) > 5
    assert page.locator(".legend .low").inner_text() == "below 1"
    page.locator("select[name=colour]").select_option("update_clipped")
    assert page.evaluate(colours) in (2, 3)  # the tool's, free, clipped
    assert page.locator(".legend .high").inner_text() == "clipped"
    for _ in range(6):  # from the fourth token to the tenth, a tool's: the update did not see it
        page.locator("[role=listbox]").press("ArrowRight")
    page.locator(".about-token").get_by_text("10 of 24").wait_for()
    facts = dict(pair.split("\n") for pair in page.locator(".about-token > div").all_inner_texts())
    assert facts["ratio of the update: new / before"] == facts["clipped by the loss"] == "–"


def sample_with_images(folder: Path) -> None:
    """A step with one sample: a text, an image of 64 tokens, a text, and a token of images that the policy drew."""
    make_up_run(folder, steps=1, prompts=1, siblings=1, tokens_every=1)
    [record] = map(json.loads, (folder / "rollouts" / "1.jsonl").read_text().splitlines())
    parts = [{"type": "image"}, {"type": "text", "text": "a picture"}]
    said = [{"role": "user", "content": "look"}, {"role": "tool", "content": parts}]
    record |= {"input": "look <image: 1024 tokens>", "trajectory": {"conversation": said}}
    (folder / "rollouts" / "1.jsonl").write_text(json.dumps(record) + "\n")
    ids, mask = [1, *[7] * 64, 2, 7], [0] * 66 + [1]
    rows = {"prompt_ids": [3, *[7] * 1024], "response_ids": ids, "response_mask": mask, "advantages": [0.5] * 67}
    table = pa.Table.from_pylist([{"uid": "1-0", "sample_index": 0, **rows}])
    texts = json.dumps({"1": "see:", "2": "so", "3": "look", "7": "<|image_pad|>"})
    table = table.replace_schema_metadata({"tokens": texts})
    with pa.ipc.new_file(str(folder / "rollouts" / "1.arrow"), table.schema) as writer:
        writer.write_table(table)


def test_an_image_is_one_word_among_the_tokens(serve, open_view, tmp_path):
    sample_with_images(tmp_path / "run")
    page = open_view(serve(tmp_path)).page
    page.get_by_role("link", name="Samples").click()
    page.locator("tr[data-sample] button").first.click()
    tokens = page.locator(".tokens .token")
    tokens.first.wait_for()
    assert tokens.all_inner_texts() == ["see:", "<image: 64 tokens>", "so", "<|image_pad|>"]
    page.get_by_text("All that is recorded").click()
    assert "look <image: 1024 tokens>" in page.locator(".one dl").first.inner_text()
    assert "<image>a picture" in page.locator(".conversation").inner_text()
    tokens.nth(1).hover()
    about = page.locator(".about-token").inner_text()
    assert "<image: 64 tokens>" in about
    assert "2 to 65 of 67" in about
    page.locator(".tokens").press("ArrowRight")
    assert "66 of 67" in page.locator(".about-token").inner_text()
    write_report(tmp_path / "run", tmp_path / "report.html")
    report = (tmp_path / "report.html").read_text()
    assert report.count("&lt;image: 64 tokens&gt;") == report.count("&lt;|image_pad|&gt;") == 2  # best, and worst
    assert "&lt;image&gt;a picture" in report


def test_times_alerts_and_keys(server, open_view):
    tab = open_view(server)
    page = tab.page
    page.locator("figure.chart").first.wait_for()
    page.keyboard.press("3")
    page.locator(".timeline .step").first.wait_for()
    assert page.get_by_role("row", name="update_actor 2.66").inner_text().split() == ["update_actor", "2.66", "28", "%"]
    page.get_by_role("button", name="Ranks of step 29").press("Enter")
    page.get_by_role("heading", name="Step 29: 9.5 s on the driver and each rank").wait_for()
    # Of 9.5 s rank 1 answers 90 % of (0.47 + 0.09 + 0.26): 7.011 s. It waits 0.1 · 9.5 s in the whole of reward.
    assert page.get_by_role("row", name="global_pool 1").inner_text().split("\t")[1:4] == [
        "7.011 s",
        "2.489 s",
        "0.95 s",
    ]
    resumed = page.locator(".timeline .resumed")
    assert resumed.inner_text() == "resumed after step 15"
    assert resumed.locator("xpath=following-sibling::*[1]/button").inner_text() == "16"
    lanes = page.locator(".lanes").get_by_role("listitem")
    assert lanes.nth(2).get_attribute("aria-label").startswith("global_pool 1: generate_sequences 4.0")
    with page.expect_download() as saved:
        page.get_by_text("Trace for Perfetto").click()
    trace = json.loads(Path(saved.value.path()).read_text())
    assert {event["name"] for event in trace["traceEvents"]} >= {
        "gen", "reward", "update_actor", "step", "ActorRolloutRefWorker.update_actor", "memory (MiB)",
        "resumed, step 15",
    }  # fmt: skip
    page.keyboard.press("4")
    page.locator("#runs li", has_text="first").locator("button.only").click()
    assert page.get_by_role("row", name="Gradient spike").inner_text().split("\t")[2] == "actor/grad_norm"
    assert page.get_by_role("row", name="Validation at 0").inner_text().split("\t")[2] == "none: not tested"
    alert = page.locator(".alert", has_text="Gradient spike, step 40")
    alert.get_by_text("Samples of this step").click()
    page.locator("p.count").get_by_text("16 samples, of 16").wait_for()
    assert page.locator(".samples th").all_inner_texts()[3] == "advantage"
    # Places 0 to 15 of the step have |place - 8| / 2.
    assert page.locator(".samples td.number").all_inner_texts()[:3] == ["4", "3.5", "3.5"]
    page.get_by_label("Sort by").select_option("gap of rollout")
    page.locator(".samples th", has_text="gap of rollout").wait_for()
    page.locator("td.number").get_by_text("0.16", exact=True).wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_text("dark or light").wait_for()


def test_keys_of_search_samples_and_theme(server, open_view):
    page = open_view(server, color_scheme="light").page
    page.locator("figure.chart").first.wait_for()
    background = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.keyboard.press("/")
    page.keyboard.type("t2")  # into the search: neither the theme nor the view changes
    assert page.locator("#search").input_value() == "t2"
    assert page.evaluate(background) == light
    page.locator("#search").blur()  # the next field would take the keys too
    page.keyboard.press("2")
    rows = page.locator(".samples tbody tr")
    rows.nth(2).wait_for()
    for key, chosen in (("j", 0), ("j", 1), ("j", 2), ("k", 1), ("k", 0), ("k", 0)):
        page.keyboard.press(key)
        page.wait_for_function(
            "at => [...document.querySelectorAll('.samples tbody tr')].findIndex("
            "row => row.classList.contains('chosen')) === at",
            arg=chosen,
        )
    page.keyboard.press("t")
    assert page.evaluate(background) == "rgb(20, 23, 27)" != light
    page.reload()
    rows.nth(2).wait_for()
    assert page.evaluate(background) == "rgb(20, 23, 27)"  # it is remembered
    page.keyboard.press("t")
    assert page.evaluate(background) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_opens_from_its_file_in_light_and_dark(chromium, folder, tmp_path, scheme):
    write_report(folder / "first", tmp_path / "report.html")
    context = chromium.new_context(viewport={"width": 1100, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: complaints.append(asked.url) if "report.html" not in asked.url else None)
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator("h1").inner_text().startswith("first: ")
    assert page.locator("h2").first.evaluate("it => getComputedStyle(it).color") == {
        "light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"
    }[scheme]  # fmt: skip
    line = page.locator("svg polyline").first
    assert line.bounding_box()["width"] > 100
    assert line.evaluate("it => getComputedStyle(it).stroke") == "rgb(47, 127, 191)"
    tokens = page.locator(".tokens").first
    assert not tokens.is_visible()
    page.get_by_text("Tokens by advantages").first.click()
    colours = tokens.locator("span").evaluate_all("all => all.map(it => getComputedStyle(it).backgroundColor)")
    assert len(colours) == 24
    assert len(set(colours)) > 2
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert complaints == []
    context.close()


@pytest.mark.parametrize("width", [1400, pytest.param(820, marks=pytest.mark.slow), 390])
def test_nothing_is_wider_than_the_window_and_everything_has_a_name(server, open_view, width):
    tab = open_view(server, width=width, color_scheme="dark")
    page = tab.page
    for view in ("runs", "samples", "time", "health"):
        tab.show(view)
        page.locator("main :is(figure, tbody tr, .timeline, .alert, .empty)").first.wait_for()
        if view == "samples":  # prompts and responses can be read without a turn to the side
            assert page.evaluate("""() => [...document.querySelectorAll(".samples")].every((one) =>
                one.scrollWidth <= one.clientWidth &&
                [...one.querySelectorAll("td.preview")].every((cell) => cell.clientWidth > 150))""")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        nameless = """() => [...document.querySelectorAll("button, input, select, a")]
            .filter(one => one.checkVisibility() &&
                !(one.textContent.trim() || one.getAttribute("aria-label") || one.closest("label")?.textContent.trim()))
            .map(one => one.outerHTML)"""
        assert page.evaluate(nameless) == []
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"


def test_a_run_that_goes_on_is_followed(serve, open_view, tmp_path):
    log = make_up_run(tmp_path / "live", steps=5, ended=False)
    tab = open_view(serve(tmp_path))
    page = tab.page
    page.locator("#runs").get_by_text("step 5").wait_for()
    page.locator("[aria-label*='critic/score/mean'][aria-label*='5 points']").wait_for()
    draw = random.Random(1)
    with log.open("a") as file:
        file.write(json.dumps(metrics_line(6, 12, draw)) + "\n" + '{"step": 7, "da')
    page.locator("#runs").get_by_text("step 6").wait_for()
    page.locator("[aria-label*='critic/score/mean'][aria-label*='6 points']").wait_for()
    write_samples(tmp_path / "live/rollouts", 6, 4, 4, draw)
    tab.show("samples")
    page.reload()
    page.locator("p.count").get_by_text("of 96").wait_for()
    make_up_run(tmp_path / "another", steps=3)
    page.locator("#runs").get_by_text("another").wait_for()


def focused(page) -> str:
    """What has the focus, by its name or the run that it belongs to."""
    return page.evaluate("""() => {
        const one = document.activeElement;
        return one.getAttribute("aria-label") || one.closest("[data-run]")?.textContent || one.tagName;
    }""")


def test_the_focus_stays_where_it_is_while_a_run_goes_on(serve, open_view, tmp_path):
    log = make_up_run(tmp_path / "live", steps=40, ended=False)
    events = tmp_path / "live" / "metrics.run.jsonl"
    first = next(line for line in events.read_text().splitlines() if '"event": "step"' in line)
    tab = open_view(serve(tmp_path))
    page = tab.page
    draw = random.Random(1)

    def go_on(step: int) -> None:
        with events.open("a") as file:
            file.write(json.dumps(json.loads(first) | {"step": step}) + "\n")
        with log.open("a") as file:
            file.write(json.dumps(metrics_line(step, 12, draw)) + "\n")
        page.locator("#runs").get_by_text(f"step {step}").wait_for()

    tab.show("time")
    page.get_by_role("button", name="Ranks of step 2", exact=True).focus()
    go_on(41)
    page.get_by_role("button", name="Ranks of step 41").wait_for()
    assert focused(page) == "Ranks of step 2"
    go_on(42)  # 40 steps are shown: step 2 has left them
    page.get_by_role("button", name="Ranks of step 42").wait_for()
    assert focused(page) == "Ranks of step 3"
    page.locator("#runs input[type=checkbox]").focus()
    go_on(43)
    assert focused(page).startswith("live")


HOSTILE = [
    "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 2'>",
    "</pre></body><iframe srcdoc='<script>parent.harmed = 3</script>'>",
    "user\u202egpj.exe \u200b\u2066hidden\u2069 \x00\x1b[31mred\x07",
    "a" * 3_000_000,
    "\ud800 half of a pair",
    "javascript:window.harmed=4",
]


def test_hostile_samples_do_no_harm(serve, open_view, tmp_path):
    make_up_run(tmp_path / "run", steps=1)
    file = tmp_path / "run/rollouts/1.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record, text in zip(records, HOSTILE, strict=False):
        named = dict.fromkeys(("input", "output", "uid", "data_source", "finish_reason", text[:50]), text)
        record |= named | {"uid": "1-0", "trajectory": None}
        del record["trajectory"]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = {"<img src=x onerror='window.harmed = 5'>": "<script>window.harmed = 6</script>"}
    start = {"event": "start", "config": config, "host": "<b>x</b>", "command": "<i>y</i>", "time": 1, "pid": 1}
    (tmp_path / "run/metrics.run.jsonl").write_text(json.dumps(start) + "\n")
    tab = open_view(serve(tmp_path))
    page = tab.page
    page.get_by_text("Settings (1)").click()
    page.get_by_text("<script>window.harmed = 6</script>").wait_for()
    tab.show("samples?limit=100")
    page.locator("tbody tr").first.wait_for()
    for row in page.locator("tbody tr").all():
        row.locator("button").click()
        page.locator(".one pre").first.wait_for()
        page.locator(".one summary").click()
    page.locator("tbody tr", has_text="gpj.exe").locator("button").click()
    page.locator(".unseen", has_text="U+202E").first.wait_for()
    assert page.locator(".unseen", has_text="U+001B").count() > 0
    assert "\u202e" not in page.locator("main").inner_text()
    assert page.evaluate("() => window.harmed") is None
    assert page.locator("main :is(script, iframe, img)").count() == 0


def test_pages_of_other_origins_get_nothing(server, open_view, tmp_path):
    tab = open_view(server)
    tab.page.locator("#runs li").first.wait_for()  # the cookie is set in this context
    stranger = tab.page.context.new_page()
    (tmp_path / "site").mkdir()
    (tmp_path / "site/index.html").write_text("<h1>another site</h1>")
    with other_site(tmp_path / "site") as address:
        stranger.goto(address)
        said = stranger.evaluate(
            """async address => {
                const of = async (settings) => {
                    try {
                        const answer = await fetch(address + "/api/runs", settings);
                        return [answer.type, await answer.text()];
                    } catch (error) { return ["refused", ""]; }
                };
                return [await of({credentials: "include"}), await of({mode: "no-cors", credentials: "include"})];
            }""",
            server.address,
        )
        assert [text for _, text in said] == ["", ""]
        frame = stranger.evaluate(
            """address => new Promise(done => {
                const frame = document.createElement("iframe");
                frame.src = address;
                frame.onload = () => done(frame.contentDocument === null);
                document.body.append(frame);
            })""",
            server.address,
        )
        assert frame


@contextlib.contextmanager
def other_site(folder: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://localhost:{site.server_port}/"
        site.shutdown()
