"""What a session says of its engines."""

from verl.serving.router import Router
from verl.serving.state import EngineLoad, SessionState, described, joined


def test_the_routers_of_a_session_share_its_engines():
    driver = SessionState(-1, 0, None, (EngineLoad(1, 0, 9.0), EngineLoad(is_lost=True)))
    worker = SessionState(7, 12, 41.2, (EngineLoad(2, 3, 4.0),))
    whole = joined([driver, worker])
    assert whole == SessionState(7, 12, 41.2, (EngineLoad(3, 3, 4.0), EngineLoad(is_lost=True)))
    assert described(whole) == (
        "engines paused for 41 s with weights of version 7; 12 requests held; engine 0: 3 requests running, 3 waiting, "
        "last answer 4 s ago; engine 1: lost"
    )


def test_texts_of_engines_that_sleep_and_of_many_that_work():
    assert described(Router(1).state()) == "no engine is awake, the last had no weights yet"
    text = described(SessionState(0, 0, None, tuple(EngineLoad(1, 0, float(i)) for i in range(20))))
    assert text.startswith("engines awake with weights of version 0; engine 19: 1 requests running, 0 waiting, last")
    assert text.endswith("engine 12: 1 requests running, 0 waiting, last answer 12 s ago; and 12 more engines at work")
