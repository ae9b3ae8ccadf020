"""The mailbox of a place: which messages it keeps, and that every wait ends."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import attrs
import pytest

from streamflow.stages.errors import EngineBrokenError, StopForward
from streamflow.stages.events import BlockReady
from streamflow.stages.mailbox import Mailbox


@attrs.frozen
class Happened:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def ready(block: int, *, pass_id: int = 1, serial: int = 0, rank: int | None = None) -> BlockReady:
    return BlockReady(pass_id, block, 0, 1, serial, block if rank is None else rank, Happened())


@pytest.fixture
def mailbox() -> Mailbox:
    mailbox = Mailbox()
    mailbox.begin(1)
    return mailbox


class Waiter(threading.Thread):
    """A compute thread that waits for a block; what came of it is in `result`."""

    def __init__(self, mailbox: Mailbox, block: int) -> None:
        super().__init__(name="test waiter")
        self.result: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._mailbox, self._block = mailbox, block
        self.start()

    def run(self) -> None:
        try:
            self.result.put(self._mailbox.wait(self._block))
        except BaseException as failure:
            self.result.put(failure)


# Which messages are kept


def test_a_message_is_taken_once(mailbox: Mailbox) -> None:
    mailbox.post(ready(3))
    assert mailbox.take(3) == (ready(3), ())
    assert mailbox.take(3) is None


def test_a_message_for_another_pass_is_dropped(mailbox: Mailbox) -> None:
    mailbox.post(ready(3, pass_id=2))
    assert mailbox.take(3) is None


def test_the_messages_of_the_last_pass_are_forgotten_by_the_next(mailbox: Mailbox) -> None:
    mailbox.post(ready(3))
    mailbox.begin(2)
    mailbox.post(ready(4))
    mailbox.post(ready(5, pass_id=2))
    assert [mailbox.take(block) for block in (3, 4)] == [None, None]
    assert mailbox.take(5) == (ready(5, pass_id=2), ())


def test_after_asking_only_answers_to_that_are_kept(mailbox: Mailbox) -> None:
    mailbox.post(ready(3))
    assert mailbox.ask() == 1
    mailbox.post(ready(4, serial=0))
    assert [mailbox.take(block) for block in (3, 4)] == [None, None]
    mailbox.post(ready(4, serial=1))
    assert mailbox.ask() == 2
    mailbox.post(ready(5, serial=1))
    assert [mailbox.take(block) for block in (4, 5)] == [None, None]
    mailbox.post(ready(5, serial=2))
    assert mailbox.take(5) == (ready(5, serial=2), ())


def test_serials_begin_anew_with_each_pass(mailbox: Mailbox) -> None:
    mailbox.ask()
    mailbox.begin(2)
    mailbox.post(ready(3, pass_id=2, serial=0))
    assert mailbox.take(3) is not None


def test_taking_a_block_gives_up_those_of_lower_rank_and_names_them(mailbox: Mailbox) -> None:
    for block in (2, 3, 5, 7):
        mailbox.post(ready(block))
    assert mailbox.take(5) == (ready(5), (2, 3))
    assert [mailbox.take(block) for block in (2, 3)] == [None, None]
    assert mailbox.take(7) == (ready(7), ())


def test_rank_counts_and_not_the_number_of_the_block(mailbox: Mailbox) -> None:
    mailbox.post(ready(8, rank=1))
    mailbox.post(ready(0, rank=2))
    assert mailbox.take(0) == (ready(0, rank=2), (8,))


# Waits


def test_a_wait_ends_at_once_if_the_message_is_there(mailbox: Mailbox) -> None:
    mailbox.post(ready(3))
    assert mailbox.wait(3) == (ready(3), ())


def test_a_wait_ends_with_its_message_and_not_with_others(mailbox: Mailbox) -> None:
    waiter = Waiter(mailbox, 3)
    for block in (1, 2, 4, 3):
        mailbox.post(ready(block))
    assert waiter.result.get(timeout=60) == (ready(3), (1, 2))
    assert mailbox.take(4) == (ready(4), ())


def test_many_waits_in_a_row_miss_no_message(mailbox: Mailbox) -> None:
    taken: list[int] = []

    def wait_for_all() -> None:
        for serial in range(1, 2001):
            asked.put(mailbox.ask())
            taken.append(mailbox.wait(serial)[0].block)

    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    thread = threading.Thread(target=wait_for_all, name="test waiter")
    thread.start()
    for _ in range(2000):
        serial = asked.get(timeout=60)
        mailbox.post(ready(serial, serial=serial))
    thread.join(60)
    assert taken == list(range(1, 2001))


def test_stopping_ends_a_wait_and_every_later_check_until_the_next_request(mailbox: Mailbox) -> None:
    waiter = Waiter(mailbox, 3)
    mailbox.stop()
    assert isinstance(waiter.result.get(timeout=60), StopForward)
    with pytest.raises(StopForward):
        mailbox.check()
    mailbox.begin(2)
    with pytest.raises(StopForward):
        mailbox.wait(3)
    mailbox.reset()
    mailbox.check()


def test_a_stopped_wait_does_not_take_a_message_that_came_before(mailbox: Mailbox) -> None:
    mailbox.post(ready(3))
    mailbox.stop()
    with pytest.raises(StopForward):
        mailbox.wait(3)


def test_a_stop_cannot_be_caught_as_an_exception() -> None:
    assert not issubclass(StopForward, Exception)


def test_breaking_off_ends_a_wait_with_the_cause_and_later_requests_too(mailbox: Mailbox) -> None:
    waiter = Waiter(mailbox, 3)
    cause = OSError("the disk is gone")
    mailbox.break_off(cause)
    failure = waiter.result.get(timeout=60)
    assert isinstance(failure, EngineBrokenError)
    assert failure.cause is failure.__cause__ is cause
    mailbox.reset()
    mailbox.begin(2)
    for end in (mailbox.check, lambda: mailbox.wait(3)):
        with pytest.raises(EngineBrokenError, match=r"OSError: the disk is gone.*close it and open a new one"):
            end()


def test_a_failure_is_told_before_a_stop(mailbox: Mailbox) -> None:
    mailbox.stop()
    mailbox.break_off(OSError("the disk is gone"))
    with pytest.raises(EngineBrokenError):
        mailbox.check()


def test_after_a_reset_messages_of_the_last_pass_are_dropped(mailbox: Mailbox) -> None:
    mailbox.post(ready(3))
    mailbox.reset()
    mailbox.post(ready(4))
    assert [mailbox.take(block) for block in (3, 4)] == [None, None]


class Interrupted(Exception):
    """What the signal handler of the test below raises."""


@contextmanager
def interrupting_the_main_thread(ready_for_it: threading.Event) -> Iterator[None]:
    """Signals the main thread from when it is ready; the first signal raises `Interrupted` there, the others nothing.

    Others: one that comes just before a thread blocks does not wake it.
    """
    raised: list[int] = []  # not an event: its lock is not for signal handlers
    over = threading.Event()
    main = threading.get_ident()

    def handle(number: int, frame: FrameType | None) -> None:
        if not raised:
            raised.append(number)
            raise Interrupted

    def interrupt() -> None:
        ready_for_it.wait()
        while not over.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt, name="test signaller")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handlers_exception_ends_a_wait_and_leaves_the_mailbox_as_it_was(mailbox: Mailbox) -> None:
    for serial in range(1, 21):
        about_to_wait = threading.Event()

        def wait(about_to_wait: threading.Event = about_to_wait) -> None:
            about_to_wait.set()
            mailbox.wait(3)

        with interrupting_the_main_thread(about_to_wait), pytest.raises(Interrupted):
            wait()
        assert mailbox.ask() == serial
        mailbox.post(ready(3, serial=serial))
        assert mailbox.wait(3) == (ready(3, serial=serial), ())
