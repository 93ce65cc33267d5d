"""What follows from the attempts of a run; the shell around it is tested on the real cluster."""

import pytest

from rechpc.host.finish import Ended, decide
from rechpc.rundir import Outcome


def ended(outcome: Outcome, *, step: int = 100, progressed: bool = True, error: str | None = None) -> Ended:
    return Ended(outcome=outcome, step=step, progressed=progressed, error=error)


@pytest.mark.parametrize("outcome", [Outcome.finished, Outcome.drained])
def test_a_run_that_is_done_or_was_asked_to_stop_stays_stopped(outcome: Outcome) -> None:
    verdict = decide([ended(outcome)], max_attempts=3)

    assert (verdict.again, verdict.failed) == (False, False)


def test_a_run_at_its_time_limit_starts_again_however_often() -> None:
    verdict = decide([ended(Outcome.requeued, step=100 * i) for i in range(1, 20)], max_attempts=3)

    assert verdict.again


def test_a_time_limit_too_short_for_a_checkpoint_gives_up_the_second_time() -> None:
    first = ended(Outcome.requeued, step=0, progressed=False)

    assert decide([first], max_attempts=3).again
    verdict = decide([first, first], max_attempts=3)
    assert verdict.failed
    assert "job.time_limit_min" in verdict.reason


def test_a_crash_after_progress_starts_again() -> None:
    assert decide([ended(Outcome.failed)], max_attempts=3).again


def test_a_crash_without_progress_is_given_up_with_its_error() -> None:
    verdict = decide([ended(Outcome.failed, progressed=False, error="rank 1: it broke")], max_attempts=3)

    assert verdict.failed
    assert "rank 1: it broke" in verdict.reason


def test_a_crash_at_the_same_step_is_given_up() -> None:
    verdict = decide([ended(Outcome.failed, step=70), ended(Outcome.failed, step=70)], max_attempts=9)

    assert verdict.failed
    assert "step 70" in verdict.reason


def test_crashes_are_counted_against_the_maximum_and_planned_stops_are_not() -> None:
    history = [ended(Outcome.failed, step=10), ended(Outcome.requeued, step=20), ended(Outcome.failed, step=30)]

    assert decide(history, max_attempts=3).again
    assert decide([*history, ended(Outcome.failed, step=40)], max_attempts=3).failed
