from verl.trainer.schedule import Schedule


def test_events_come_by_frequency_and_at_the_last_step():
    schedule = Schedule(10, {"save": 4, "test": -1})
    assert [step for step in range(1, 11) if schedule.due("save", step)] == [4, 8, 10]
    assert not any(schedule.due("test", step) for step in range(1, 11))
