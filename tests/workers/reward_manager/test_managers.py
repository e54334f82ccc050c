"""Reward managers beyond the naive one; turns, failures and components; a service over real HTTP."""

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from tests.workers.reward_manager.batches import LENGTH, TOKENIZER, batch_of
from tests.workers.reward_manager.hostile import acts, length_of, per_text, stamps
from verl.errors import ConfigError, RewardError
from verl.experience.rewards import EqualScores, RewardRecord, component_metrics, status_metrics
from verl.experience.scoring import leave_out_failed, score_columns, submit_scores
from verl.protocol import replace_columns
from verl.scorers.remote import RemoteScorer
from verl.supervision.killable_pool import RateLimit
from verl.trainer.config import PPOConfig
from verl.trainer.ppo.reward import compute_reward, load_reward_manager
from verl.workers.reward_manager import (
    BatchRewardManager,
    DAPORewardManager,
    GDPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    RateLimitedRewardManager,
    RemoteRewardManager,
    get_reward_manager_cls,
)
from verl.workers.reward_manager.dapo import overlong_penalty

NAMES = {
    "naive": NaiveRewardManager,
    "batch": BatchRewardManager,
    "dapo": DAPORewardManager,
    "prime": PrimeRewardManager,
    "limited": RateLimitedRewardManager,
    "remote": RemoteRewardManager,
    "gdpo": GDPORewardManager,
}


@pytest.mark.parametrize("name", NAMES)
def test_every_manager_has_its_name_here_and_there(name):
    from verl.experimental.reward_loop import reward_manager as elsewhere

    assert get_reward_manager_cls(name) is NAMES[name]
    assert getattr(elsewhere, NAMES[name].__name__) is NAMES[name]


# ---- sixty-four samples, eight of them hostile ---------------------------------------------------


def test_eight_bad_samples_of_sixty_four_cost_nobody_else_a_score():
    bad = {3: "sleep", 11: "spin", 12: "hang_in_c", 40: "sleep", 20: "os_exit", 21: "sys_exit", 33: "hog", 50: "raise"}
    sources = [bad.get(row, "ok") for row in range(64)]
    data = batch_of(["ab"] * 64, [float(row) / 64 for row in range(64)], sources)
    manager = NaiveRewardManager(TOKENIZER, 0, acts, timeout_s=3.0, memory_limit_mb=128, max_error_rate=0.2)
    scores, extra = compute_reward(data, manager)
    expected = {"sleep": "timeout", "spin": "timeout", "hang_in_c": "timeout", "hog": "out_of_memory", "raise": "error"}
    expected |= {"os_exit": "crashed", "sys_exit": "crashed", "ok": "ok"}
    assert extra["reward_status"] == [expected[how] for how in sources]
    assert scores.sum(-1).tolist() == [0.0 if row in bad else row / 64 for row in range(64)]
    metrics = status_metrics(extra["reward_status"])
    assert metrics == {
        "reward/error_rate": 8 / 64,
        "reward/status/timeout": 4 / 64,
        "reward/status/crashed": 2 / 64,
        "reward/status/out_of_memory": 1 / 64,
        "reward/status/error": 1 / 64,
        "reward/status/killed": 0.0,
    }


# ---- what becomes of failures --------------------------------------------------------------------


def groups():
    data = batch_of(["ab"] * 6)  # a, b, <eos>
    data.non_tensor_batch["uid"] = np.array(["p", "p", "p", "q", "q", "q"], dtype=object)
    return data, ["ok", "timeout", "ok", "ok", "ok", "ok"]


def test_mask_takes_out_the_sample_and_leaves_its_group():
    data, statuses = groups()
    columns, metrics = leave_out_failed(data, statuses, "mask")
    assert columns.batch["response_mask"].sum(-1).tolist() == [3, 0, 3, 3, 3, 3]
    assert columns.batch["response_mask"].dtype == data.batch["response_mask"].dtype
    uids = columns.non_tensor_batch["uid"].tolist()
    assert uids[:1] + uids[2:] == ["p", "p", "q", "q", "q"]
    assert uids[1] not in ("p", "q")
    assert metrics["reward/left_out_rate"] == metrics["reward/error_rate"] == pytest.approx(1 / 6)
    assert data.batch["response_mask"].sum() == 18  # the batch itself is as it was
    assert data.non_tensor_batch["uid"].tolist() == ["p", "p", "p", "q", "q", "q"]


def test_drop_group_takes_out_all_siblings():
    data, statuses = groups()
    columns, metrics = leave_out_failed(data, statuses, "drop_group")
    assert columns.batch["response_mask"].sum(-1).tolist() == [0, 0, 0, 3, 3, 3]
    assert columns.non_tensor_batch["uid"].tolist()[3:] == ["q", "q", "q"]
    assert len(set(columns.non_tensor_batch["uid"])) == 4  # no baseline of failures
    assert (metrics["reward/left_out_rate"], metrics["reward/status/timeout"]) == (0.5, pytest.approx(1 / 6))


def test_stop_names_the_sample():
    data, statuses = groups()
    with pytest.raises(RewardError, match=r"1 of 6 .* sample p \(timeout\), and reward_model\.on_failure=stop"):
        leave_out_failed(data, statuses, "stop")
    columns, _ = leave_out_failed(data, ["ok"] * 6, "stop")
    assert columns.batch["response_mask"] is data.batch["response_mask"]  # it need not travel again
    assert columns.batch["response_mask"].sum() == 18


@pytest.mark.parametrize("policy", ["mask", "drop_group", "stop"])
def test_a_failed_trajectory_is_left_out_alone_and_is_no_failure_of_the_reward(policy: str):
    data, statuses = groups()
    statuses[1] = "trajectory: timeout"
    columns, metrics = leave_out_failed(data, statuses, policy)
    assert columns.batch["response_mask"].sum(-1).tolist() == [3, 0, 3, 3, 3, 3]
    assert (metrics["reward/left_out_rate"], metrics["reward/error_rate"]) == (pytest.approx(1 / 6), 0)


def test_a_score_on_a_token_of_a_tool_counts_for_the_turn_before_it():
    """As reward managers place it that know only how long a response is."""

    class OnLastToken:
        def __call__(self, data, return_dict=False):
            scores = torch.zeros(data.batch["responses"].shape)
            lengths = data.batch["attention_mask"][:, -scores.shape[1] :].sum(-1)
            scores[torch.arange(len(data)), lengths - 1] = torch.tensor([0.5, 2.0])
            return scores

    data = batch_of(["abc", "abc"])  # a, b, c, <eos>
    data.batch["response_mask"] = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0]])
    scores, extra = compute_reward(data, OnLastToken())
    assert scores.tolist() == [[0, 0.5, 0, 0, 0, 0], [0, 0, 0, 2, 0, 0]]
    assert extra["score"] == [0.5, 2.0]
    model = batch_of(["abc"], rm_scores=torch.tensor([[0.0, 0.0, 0.0, 4.0, 0.0, 0.0]]))
    model.batch["response_mask"] = torch.tensor([[0, 1, 0, 0, 0, 0]])
    scores, _ = compute_reward(model, NaiveRewardManager(TOKENIZER, 0))
    assert scores.tolist() == [[0, 4, 0, 0, 0, 0]]


def test_a_sample_without_anything_to_be_compared_with_is_left_out():
    data, statuses = groups()
    statuses[2] = "error"  # only one of p is left
    columns, metrics = leave_out_failed(data, statuses, "mask", needs_siblings=True)
    assert columns.batch["response_mask"].sum(-1).tolist() == [0, 0, 0, 3, 3, 3]
    assert (metrics["reward/error_rate"], metrics["reward/left_out_rate"]) == (pytest.approx(2 / 6), 0.5)
    alone, _ = leave_out_failed(data, statuses, "mask")
    assert alone.batch["response_mask"].sum(-1).tolist() == [3, 0, 0, 3, 3, 3]


def test_a_failed_greedy_response_takes_its_prompt_out_and_fails_no_sample():
    data, _ = groups()
    data.non_tensor_batch["baseline_status"] = np.array(["timeout"] * 3 + ["ok"] * 3, dtype=object)
    columns, metrics = leave_out_failed(data, ["ok"] * 6, "mask")
    assert columns.batch["response_mask"].sum(-1).tolist() == [0, 0, 0, 3, 3, 3]
    assert metrics["reward/error_rate"] == 0
    assert metrics["reward/baseline_error_rate"] == metrics["reward/left_out_rate"] == 0.5
    with pytest.raises(RewardError, match=r"sample p \(timeout\)"):
        leave_out_failed(data, ["ok"] * 6, "stop")


def recorded(scores, statuses=None, uids="ppqq"):
    data = batch_of(["ab"] * len(scores), ["7"] * len(scores), finish_reason=["length"] * len(scores))
    data.non_tensor_batch["uid"] = np.array(list(uids), dtype=object)
    tokens = torch.zeros(data.batch["responses"].shape)
    tokens[:, 0] = torch.tensor(scores)
    extra = {"reward_status": statuses or ["ok"] * len(scores)}
    columns, rates = leave_out_failed(data, extra["reward_status"], "mask")
    record = RewardRecord()
    record.add(replace_columns(data, columns | score_columns(tokens, extra)), list(extra), rates)
    return record


@pytest.mark.parametrize(
    "scores, statuses, expected",
    [
        ([1.0, 1.0, 0.0, 1.0], None, 1 / 2),
        ([1.0, 1.0, 0.0, 0.0], None, 1.0),
        ([1.0, 1.0, 0.0, 1.0], ["ok", "error", "ok", "ok"], 0.0),  # of p one response is left, which is no group
    ],
)
def test_groups_whose_scores_are_all_equal_are_counted(scores, statuses, expected):
    assert recorded(scores, statuses).metrics()["reward/equal_group_rate"] == expected


def test_equal_scores_of_three_steps_are_one_warning_with_an_example(caplog):
    watch, flat = EqualScores(TOKENIZER), [0.0] * 4
    for scores in (flat, flat, [0.0, 0.0, 0.0, 1.0], flat, flat):
        watch.check(recorded(scores))
    assert not caplog.records
    for _ in range(5):
        watch.check(recorded(flat))
    [warning] = [record.getMessage() for record in caplog.records]
    assert "each of the last 3 steps have the same score, 4 with 0 in this step" in warning
    assert "4 of 4 ended at data.max_response_length" in warning
    assert warning.endswith("\nab\n{'style': 'rule', 'ground_truth': '7'}")


def test_the_metrics_of_a_step_are_of_every_batch_that_was_scored():
    # Two batches of 6 and 3. Errors: 1 of 6 and 2 of 3, so 3 of 9. Scores that count: five of 1, one of 4.
    record = RewardRecord()
    for rows, scores, statuses in (
        (6, [1.0] * 5 + [0.0], ["ok"] * 5 + ["error"]),
        (3, [4.0, 0.0, 0.0], ["ok", "timeout", "timeout"]),
    ):
        data, extra = batch_of(["ab"] * rows), {"score": scores, "reward_status": statuses}
        if rows == 3:
            extra["style"] = [0.5, None, None]
        columns, rates = leave_out_failed(data, statuses, "mask")
        tokens = torch.zeros(data.batch["responses"].shape)
        tokens[:, 0] = torch.tensor(scores)
        record.add(replace_columns(data, columns | score_columns(tokens, extra)), list(extra), rates)
    metrics = record.metrics()
    assert metrics["reward/error_rate"] == metrics["reward/left_out_rate"] == pytest.approx(3 / 9)
    assert metrics["reward/status/timeout"] == pytest.approx(2 / 9)
    assert metrics["reward/score/mean"] == pytest.approx((5 * 1 + 4) / 6)
    assert (metrics["reward/score/max"], metrics["reward/score/min"]) == (4, 1)
    assert metrics["reward/style/mean"] == 0.5
    assert record.generated_tokens() == 9 * 3  # a, b, <eos>


@pytest.mark.parametrize("name", ["uid", "response_mask", "values"])
def test_names_of_columns_are_refused(name):
    def manager(data, return_dict):
        return {"reward_tensor": torch.zeros(data.batch["responses"].shape), "reward_extra_info": {name: [1, 2]}}

    with pytest.raises(RewardError, match=rf"returned '{name}', the name of a column .* Give it another name"):
        compute_reward(batch_of(["ab"] * 2), manager)


def test_components_are_means_over_those_that_have_them():
    extra = {
        "score": [1.0, 0.0, 0.0, 0.5],
        "acc": [True, None, False, True],
        "format": [0.5, 9.0, None, 0.1],
        "pred": ["a", "b", None, 3],
        "reward_status": ["ok", "error", "ok", "ok"],
    }
    # row 1 failed: score over 1, 0, 0.5; acc over 1, 0, 1; format over 0.5, 0.1; pred has texts
    metrics = component_metrics(extra)
    assert metrics == {
        "reward/score/mean": pytest.approx(0.5),
        "reward/score/max": 1.0,
        "reward/score/min": 0.0,
        "reward/acc/mean": pytest.approx(2 / 3),
        "reward/acc/max": 1.0,
        "reward/acc/min": 0.0,
        "reward/format/mean": pytest.approx(0.3),
        "reward/format/max": 0.5,
        "reward/format/min": pytest.approx(0.1),
    }
    assert component_metrics({"score": [None], "reward_status": ["ok"]}) == {}


# ---- turns, single samples, beside other work ----------------------------------------------------


def test_scores_of_turns_sit_on_their_last_tokens():
    data = batch_of(["abcdef"] * 3)
    data.batch["response_mask"] = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]])

    def by_turn(extra_info):
        return {"turn_scores": [0.25, 0.5] if extra_info["row"] != 1 else [1.0]}

    def score(solution_str, extra_info):
        return by_turn(extra_info)

    manager = NaiveRewardManager(TOKENIZER, 0, score, max_error_rate=1.0)
    tokens, extra = compute_reward(data, manager)
    # two turns; one score for two turns; two scores for one turn
    assert tokens.tolist() == [[0, 0.25, 0, 0, 0.5, 0], [0.0] * 6, [0.0] * 6]
    assert extra == {"score": [0.75, 0.0, 0.0], "reward_status": ["ok", "error", "error"]}


def test_one_sample_in_an_event_loop():
    patient, hasty = (NaiveRewardManager(TOKENIZER, 0, acts, timeout_s=seconds) for seconds in (60.0, 1.0))

    async def score_both():
        good, bad = batch_of(["ab"], [0.5], "ok"), batch_of(["ab"], [0.5], "sleep")
        return await asyncio.gather(patient.run_single(good), hasty.run_single(bad))

    good, bad = asyncio.run(score_both())
    assert good == {"reward_score": 0.5, "reward_extra_info": {"score": 0.5, "reward_status": "ok"}}
    assert bad == {"reward_score": 0.0, "reward_extra_info": {"score": 0.0, "reward_status": "timeout"}}


def test_scoring_goes_on_beside_other_work(tmp_path):
    def score(solution_str):
        while not (tmp_path / "go").exists():
            time.sleep(0.02)
        return 1.0

    pending = submit_scores(batch_of(["a", "b"]), NaiveRewardManager(TOKENIZER, 0, score))
    (tmp_path / "go").touch()  # so it has come back before anything is scored
    scores, _ = pending.result()
    assert scores.sum(-1).tolist() == [1.0, 1.0]


# ---- batch, prime, gdpo --------------------------------------------------------------------------


def test_batch():
    manager = BatchRewardManager(TOKENIZER, 0, per_text, bonus=1.0)
    tokens, extra = compute_reward(batch_of(["ab", "c"], ["ab", "x"]), manager)
    assert tokens.sum(-1).tolist() == pytest.approx([1.2, 1.1])
    assert extra["acc"] == [True, False]
    by_sample = BatchRewardManager(TOKENIZER, 0, length_of)(batch_of(["ab", "c"]))
    assert by_sample.sum(-1).tolist() == pytest.approx([0.2, 0.1])


def test_prime_scores_samples():
    sources = ["ok", "raise", "ok", "nan", "text"]
    manager = PrimeRewardManager(TOKENIZER, 0, acts, num_workers=2, max_error_rate=1.0)
    _, extra = compute_reward(batch_of(["a"] * 5, [0.1, 0.2, 0.3, 0.4, 0.5], sources), manager)
    assert extra == {"score": [0.1, 0, 0.3, 0, 0], "reward_status": ["ok", "error", "ok", "error", "error"]}
    with pytest.raises(ConfigError, match="PrimeRewardManager"):
        PrimeRewardManager(TOKENIZER, 0, per_text)


def test_gdpo_returns_every_reward():
    manager = GDPORewardManager(TOKENIZER, 0, lambda solution_str: {"score": 1.0, "format": 0.5, "correct": 0.25})
    _, extra = compute_reward(batch_of(["a", "b"]), manager)
    assert (extra["format"], extra["correct"]) == ([0.5, 0.5], [0.25, 0.25])


# ---- dapo ----------------------------------------------------------------------------------------


def test_overlong_penalty_by_hand():
    # longest 10, buffer 4, factor 2: free to 6; at 7 lose 2·1/4, at 9 2·3/4, from 10 on 2
    lengths = [0, 6, 7, 9, 10, 12]
    assert [overlong_penalty(length, 10, 4, 2.0) for length in lengths] == [0.0, 0.0, -0.5, -1.5, -2.0, -2.0]
    assert [overlong_penalty(length, 10, 0, 2.0) for length in lengths] == [0.0, 0.0, 0.0, 0.0, 0.0, -2.0]


def test_dapo_penalises_on_the_last_token_and_reports_the_score():
    # "ab" has 3 tokens with <eos>, "abcdef" 6; longest 6, buffer 2, factor 1: 4 are free, 5 lose 0.5, 6 lose 1
    settings = {"enable": True, "len": 2, "penalty_factor": 1.0, "log": True}
    manager = DAPORewardManager(TOKENIZER, 0, acts, max_resp_len=6, overlong_buffer_cfg=settings, max_error_rate=0.5)
    # Of the last response a tool wrote two of the tokens: b and c.
    data = batch_of(["ab", "abcd", "abcdef", "abcdef", "abcdef"], [0.1] * 5, ["ok", "ok", "ok", "raise", "ok"])
    data.batch["response_mask"][4, 1:3] = 0
    tokens, extra = compute_reward(data, manager)
    expected = torch.zeros(5, LENGTH)
    expected[0, 2], expected[1, 4], expected[2, 5], expected[4, 5] = 0.1, 0.1 - 0.5, 0.1 - 1.0, 0.1
    torch.testing.assert_close(tokens, expected)
    assert extra == {
        "acc": [0.1, 0.1, 0.1, None, 0.1],
        "overlong_reward": [0.0, -0.5, -1.0, None, 0.0],
        "overlong": [False, True, True, None, False],
        "score": [0.1, 0.1, 0.1, 0.0, 0.1],
        "reward_status": ["ok", "ok", "ok", "error", "ok"],
    }


def test_dapo_without_a_buffer_is_naive():
    data = batch_of(["ab", "abcdef"])
    plain = DAPORewardManager(TOKENIZER, 0, length_of, overlong_buffer_cfg={"enable": False, "len": 99})
    assert torch.equal(plain(data), NaiveRewardManager(TOKENIZER, 0, length_of)(data))


@pytest.mark.parametrize(
    "settings, longest, says",
    [
        ({"enable": True, "len": 2}, None, "max_resp_len=None"),
        ({"enable": True, "len": 7}, 6, "len=7 must be a number of tokens from 0 to max_resp_len=6"),
        ({"enable": True, "len": -1}, 6, "len=-1"),
        ({"enable": True, "penalty_factor": -1.0}, 6, "penalty_factor=-1.0"),
        ({"enable": True, "lenght": 2}, 6, "Did you mean 'len'"),
    ],
)
def test_dapo_settings_that_are_wrong(settings, longest, says):
    with pytest.raises(ConfigError) as caught:
        DAPORewardManager(TOKENIZER, 0, length_of, max_resp_len=longest, overlong_buffer_cfg=settings)
    assert says in str(caught.value)


def test_dapo_from_a_configuration():
    buffer = {"enable": True, "len": 2, "penalty_factor": 1.0}
    settings = PPOConfig(
        reward_model={"reward_manager": "dapo", "reward_kwargs": {"overlong_buffer_cfg": buffer}, "timeout_s": 7.0},
        reward_manager={"name": "dapo"},
        data={"max_response_length": 6},
    )
    manager = load_reward_manager(settings, TOKENIZER, 0)
    assert isinstance(manager, DAPORewardManager)
    assert (manager.max_resp_len, manager.overlong_buffer_cfg.len, manager.max_error_rate) == (6, 2, 0.5)
    assert manager.function.batch_timeout_s == 70.0


# ---- limited -------------------------------------------------------------------------------------


def test_limited_keeps_concurrency():
    manager = RateLimitedRewardManager(TOKENIZER, 0, stamps, max_concurrent=2)
    _, extra = compute_reward(batch_of(["a"] * 6), manager)
    spans = list(zip(extra["started"], extra["ended"], strict=True))
    assert max(sum(s <= start < e for s, e in spans) for start, _ in spans) == 2


@pytest.mark.parametrize("limits", [{"max_rpm": 300}, {"max_tpm": 3000, "estimated_tokens_per_request": 10}])
def test_limited_keeps_rates(limits, monkeypatch):
    # 300 calls, or 3000 tokens of 10 a call, are 5 a second: the 12th starts 1.4 s after the first.
    starts, take = [], RateLimit.take

    def noted(limit, tokens, now):
        starts.append(now)
        take(limit, tokens, now)

    monkeypatch.setattr(RateLimit, "take", noted)  # by the clock of the one who starts; processes may be late
    manager = RateLimitedRewardManager(TOKENIZER, 0, stamps, max_concurrent=64, **limits)
    _, extra = compute_reward(batch_of(["a"] * 12), manager)
    assert len(starts) == 12
    assert starts[-1] - starts[0] > 1.399
    assert extra["reward_status"] == ["ok"] * 12


def test_limited_takes_plain_functions_and_refuses_nonsense():
    manager = RateLimitedRewardManager(TOKENIZER, 0, length_of, max_rpm=6000)
    assert manager(batch_of(["ab"])).sum() == pytest.approx(0.2)
    with pytest.raises(ConfigError, match="max_rpm=0 must be positive"):
        RateLimitedRewardManager(TOKENIZER, 0, length_of, max_rpm=0)


# ---- remote --------------------------------------------------------------------------------------


class Service(BaseHTTPRequestHandler):
    seen: list = []
    lock = threading.Lock()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.seen.append((body, self.headers.get("Authorization")))
            tries = sum(other["extra_info"] == body["extra_info"] for other, _ in self.seen)
        how = body["data_source"]
        if how == "slow":
            time.sleep(3)
        status = {"refuses": 403, "echoes": 403, "broken": 500}.get(how, 503 if how == "flaky" and tries < 3 else 200)
        answer = {"garbage": b"<html>", "nan": b"NaN", "dict": b'{"score": 0.25, "acc": true}'}.get(how)
        answer = str(self.headers).encode() if how == "echoes" else answer
        answer = answer or json.dumps(float(body["solution_str"] == body["ground_truth"])).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # with fewer, connections that come together wait for a second try of the kernel


@pytest.fixture
def service():
    server = Server(("127.0.0.1", 0), Service)
    Service.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()


def test_remote(service):
    sources = ["right", "wrong", "dict", "flaky", "refuses", "garbage", "nan", "broken"]
    data = batch_of(["ab"] * 8, ["ab", "x", "", "ab", "", "", "", ""], sources)
    manager = RemoteRewardManager(
        TOKENIZER, 0, None, url=service, headers={"Authorization": "Bearer t"}, max_error_rate=1.0,
        request_timeout_s=30.0, timeout_s=100.0, max_retries=2,
    )  # fmt: skip
    scores, extra = compute_reward(data, manager)
    assert extra["reward_status"] == ["ok", "ok", "ok", "ok", "error", "error", "error", "error"]
    assert scores.sum(-1).tolist() == [1.0, 0.0, 0.25, 1.0, 0, 0, 0, 0]
    assert extra["acc"] == [None, None, True] + [None] * 5
    tries = [sum(body["data_source"] == source for body, _ in Service.seen) for source in sources]
    assert tries == [1, 1, 1, 3, 1, 1, 1, 3]  # what may pass is tried again, twice
    body, token = next(entry for entry in Service.seen if entry[0]["data_source"] == "right")
    assert body == {"data_source": "right", "solution_str": "ab", "ground_truth": "ab"} | {
        "extra_info": {"row": 0, "last_turn_str": "ab", "conversation_str": "ab"}
    }
    assert token == "Bearer t"


def test_remote_tries_again_where_no_answer_comes(service):
    manager = RemoteRewardManager(
        TOKENIZER, 0, None, url=service, max_error_rate=1.0, request_timeout_s=1.0, timeout_s=60.0, max_retries=1
    )
    _, extra = compute_reward(batch_of(["ab"], [""], ["slow"]), manager)
    assert extra["reward_status"] == ["timeout"]
    assert len(Service.seen) == 2


def test_remote_says_what_the_service_said(service):
    manager = functools.partial(RemoteRewardManager, TOKENIZER, 0)
    with pytest.raises(RewardError, match="answered 403"):
        manager(url=service)(batch_of(["a"], ["a"], "refuses"))
    with pytest.raises(RewardError, match="answered what is no JSON: <html>"):
        manager(url=service)(batch_of(["a"], ["a"], "garbage"))
    with pytest.raises(RewardError, match=r"http://127\.0\.0\.1:9/ cannot be reached"):
        manager(url="http://127.0.0.1:9/", max_retries=0)(batch_of(["a"], ["a"]))


def test_a_remote_service_that_accepts_no_connection_is_lost_and_not_slow():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as waiting:
        url = "http://{}:{}/".format(*server.getsockname())
        for _ in range(3):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        manager = RemoteRewardManager(
            TOKENIZER, 0, None, url=url, max_error_rate=1.0, request_timeout_s=0.1, max_retries=0
        )
        _, extra = compute_reward(batch_of(["ab"], [""]), manager)
    assert extra["reward_status"] == ["error"]


def test_remote_shows_no_secrets(service):
    async def ask(source):
        scorer = RemoteScorer(service, {"Authorization": "Bearer sk-5ecre7"}, max_retries=0)
        await scorer(source, "a", "a", {})

    for source in ("echoes", "refuses", "garbage"):
        with pytest.raises(RewardError) as caught:
            asyncio.run(ask(source))
        shown = "".join(traceback.format_exception(caught.value))
        assert service in shown
        assert "5ecre7" not in shown
    with pytest.raises(ConfigError, match="holds a password") as caught:
        RemoteScorer("http://me:5ecre7@localhost:1/")
    assert "5ecre7" not in str(caught.value)


def test_remote_settings_that_are_wrong():
    with pytest.raises(ConfigError, match=r"url=''.*reward_kwargs"):
        RemoteRewardManager(TOKENIZER, 0)
    with pytest.raises(ConfigError, match="a reward function was chosen as well"):
        RemoteRewardManager(TOKENIZER, 0, length_of, url="http://x/")
    with pytest.raises(ConfigError, match="max_retries=-1"):
        RemoteRewardManager(TOKENIZER, 0, url="http://x/", max_retries=-1)
