"""Rules of where and how long generated programs run."""

from tests.trainer.config.support import Run, only


def test_the_code_service_needs_an_address(run: Run):
    message = only(run.refusal({"reward_model.sandbox_fusion.url": "localhost:8080"}))
    assert "reward_model.sandbox_fusion.url=localhost:8080: it is no address of http" in message
    loaded = run.load({"reward_model.sandbox_fusion.url": "http://localhost:8080/run_code"})
    assert loaded.reward_model.sandbox_fusion.url == "http://localhost:8080/run_code"


def test_a_program_ends_before_its_sample_is_given_up(run: Run):
    message = only(run.refusal({"reward_model.timeout_s": 20, "reward_model.scorer_kwargs.total_time_limit_s": 20}))
    assert "reward_model.scorer_kwargs.total_time_limit_s=20" in message
    assert "allowed: less than 20" in message
    run.load({"reward_model.timeout_s": 20, "reward_model.scorer_kwargs.total_time_limit_s": 19})


def test_a_run_needs_memory_for_an_interpreter(run: Run):
    assert "memory_limit_mb" in only(run.refusal({"reward_model.sandbox_fusion.memory_limit_mb": 63}))
