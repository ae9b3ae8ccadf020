"""What a rank says of its waves, and when it has to."""

from __future__ import annotations

from streamflow.stages.ranks.duties import Duties
from streamflow.stages.ranks.errors import RankClosedError, RankLostError
from streamflow.stages.ranks.messages import Ending, RankReply, Verdict, WaveBegin
from streamflow.stages.ranks.signature import WaveSignature
from streamflow.stages.testing.waves import ScriptedWaves

LONG = WaveSignature((("transformer", 3),))


def begun() -> tuple[ScriptedWaves, Duties, int]:
    """Waves at 100.0 whose first one has a member."""
    waves = ScriptedWaves(lambda: 100.0)
    duties = Duties(waves, 60.0)
    ticket = waves.add(LONG)
    duties.do(RankReply(begin=WaveBegin(1, LONG, "request 'x' of rank 0", (ticket,), ())), 100.0)
    duties.status(100.0)
    return waves, duties, ticket


def test_requests_and_the_ends_of_waves_are_news_and_walks_are_not() -> None:
    waves, duties, _ = begun()
    waves.walk()
    waves.walk()
    assert not duties.has_news()
    waves.walk()
    assert duties.has_news()
    duties.status(100.0)
    assert not duties.has_news()
    waves.add(LONG)
    assert duties.has_news()


def test_the_last_member_that_leaves_is_news() -> None:
    waves, duties, ticket = begun()
    waves.end(ticket)
    assert duties.has_news()


def test_a_request_says_how_long_it_has_waited() -> None:
    waves, duties, _ = begun()
    waves.add(LONG, "late")
    [request] = duties.status(103.5).waiting
    assert (request.name, request.signature, request.waited_s) == ("late", LONG, 3.5)


def test_a_promise_is_said_until_the_end_is_told() -> None:
    waves, duties, ticket = begun()
    assert duties.status(100.0).promise is None
    waves.walk()
    waves.end(ticket)
    duties.do(RankReply(hold=True), 100.0)
    assert duties.status(100.0).promise == 1
    assert not waves.can_walk()
    duties.do(RankReply(end_after=2), 100.0)
    assert duties.status(100.0).promise is None
    assert waves.can_walk()


def test_closing_between_waves_turns_away_and_breaks_nothing() -> None:
    waves, duties, _ = begun()
    while waves.can_walk():
        waves.walk()
    ticket = waves.add(LONG)
    verdict = Verdict(Ending.CLOSED, 2, "")
    duties.end(verdict, verdict.error())
    assert isinstance(waves.refused[ticket], RankClosedError)
    assert waves.failure is None


def test_closing_within_a_wave_and_everything_else_breaks_it() -> None:
    for ending, error in ((Ending.CLOSED, RankClosedError), (Ending.LOST, RankLostError)):
        waves, duties, _ = begun()
        verdict = Verdict(ending, 2, "silent")
        duties.end(verdict, verdict.error())
        assert isinstance(waves.failure, error)
