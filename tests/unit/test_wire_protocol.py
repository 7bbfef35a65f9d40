"""Messages over a pipe: who sends never waits, and what is sent first arrives first."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from hetrun.client.events import Event
from hetrun.client.wire_protocol import SMALL, Channel, EventsMessage, Message, packed, unpacked
from tests.support.limits import Within

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = (Channel(Connection(end.detach())) for end in socket.socketpair())
    yield one, other
    for channel in (one, other):
        channel.close()


def answer(key: int, size: int = 1) -> EventsMessage:
    return EventsMessage(key, (Event("token", "x" * size, key),))


def received(channel: Channel, n: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < n:
        found += channel.receive()
    return found


def test_what_is_small_is_written_by_who_sends_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    writers: list[threading.Thread] = []
    send = Connection.send_bytes

    def watched(self: Connection, data: bytes) -> None:
        writers.append(threading.current_thread())
        send(self, data)

    monkeypatch.setattr(Connection, "send_bytes", watched)
    one.send(answer(1))
    assert other.receive() == [answer(1)]
    assert writers == [threading.current_thread()]


def test_who_sends_does_not_wait_for_who_reads(pair: Pair, within: Within) -> None:
    one, other = pair
    sizes = [1, SMALL // 2, SMALL, 1 << 20, 1, 1, SMALL, 1]
    sent = [answer(i, size) for i, size in enumerate(sizes * 40)]
    with within(10):
        for message in sent:
            one.send(message)  # where it waits, it waits for ever: nothing has been read yet
    assert received(other, len(sent)) == sent


def test_messages_of_several_threads_arrive_each_in_its_order(pair: Pair) -> None:
    one, other = pair

    def send(thread: int) -> None:
        for i in range(300):
            one.send(answer(1000 * thread + i, 1 if i % 7 else 2 * SMALL))

    threads = [threading.Thread(target=send, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    keys = [m.key for m in received(other, 1200) if isinstance(m, EventsMessage)]
    for t in range(4):
        assert [key for key in keys if key // 1000 == t] == [1000 * t + i for i in range(300)]
    for thread in threads:
        thread.join()


def test_what_lingers_arrives_together(pair: Pair) -> None:
    one, other = pair
    one.linger_s = 0.2
    for i in range(3):
        one.send(answer(i))
    assert other.receive() == [answer(i) for i in range(3)]
    one.linger_s = 0.0
    one.send(answer(3))
    assert other.receive() == [answer(3)]


def test_sending_to_a_closed_socket_is_no_error(pair: Pair) -> None:
    one, other = pair
    other.close()
    for i in range(5):
        one.send(answer(i, 1 if i % 2 else 2 * SMALL))
    with pytest.raises((EOFError, OSError)):
        one.receive()


@pytest.mark.parametrize("size", [1, 100_000])
def test_who_waits_hears_of_a_message_that_could_not_be_written(
    pair: Pair, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Connection, data: bytes) -> None:
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(Connection, "send_bytes", fails)
    one, other = pair
    one.send(answer(1, size))
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(EOFError):
        one.receive()


def test_what_an_event_says_besides_its_text_arrives() -> None:
    for event in (Event("token", "a", 1), Event("token", "a", 1, opened="<think>")):
        answer = EventsMessage(1, (event,))
        assert unpacked(packed(answer)) == answer
