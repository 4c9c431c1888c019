import socket
import struct
import threading

import pytest

from sol_gym.sandbox.worker import wire


@pytest.fixture
def pair():
    a, b = socket.socketpair()
    yield a, b
    a.close()
    b.close()


def test_messages_arrive_as_they_were_sent(pair):
    wire.send(pair[0], {"cmd": "x", "values": [1, 2.5, None, "ü"]})
    assert wire.receive(pair[1], 1.0) == {"cmd": "x", "values": [1, 2.5, None, "ü"]}


def test_silence_is_a_timeout(pair):
    with pytest.raises(wire.Timeout):
        wire.receive(pair[1], 0.05)


def test_half_a_message_is_a_timeout(pair):
    pair[0].sendall(struct.pack("<I", 100) + b"{")
    with pytest.raises(wire.Timeout):
        wire.receive(pair[1], 0.05)


def test_a_closed_peer_is_told_apart(pair):
    pair[0].close()
    with pytest.raises(wire.Closed):
        wire.receive(pair[1], 1.0)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 3) + b"abc",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 0),
    ],
)
def test_nonsense_is_a_violation(pair, data):
    pair[0].sendall(data)
    with pytest.raises(wire.ProtocolError):
        wire.receive(pair[1], 0.5)


def test_too_long_a_message_is_not_sent(pair):
    with pytest.raises(wire.ProtocolError):
        wire.send(pair[0], {"x": "y" * (wire.MAX_MESSAGE + 1)})


def test_deeply_nested_json_is_a_violation_not_a_crash(pair):
    data = b"[" * 100_000
    thread = threading.Thread(target=pair[0].sendall, args=(struct.pack("<I", len(data)) + data,))
    thread.start()
    with pytest.raises(wire.ProtocolError):
        wire.receive(pair[1], 2.0)
    thread.join()


def test_words_of_a_page_are_shared():
    import os

    page, fd = wire.Page.create()
    other = wire.Page(fd)
    os.close(fd)
    page.words[wire.GO] = 2**63 + 5
    assert other.words[wire.GO] == 2**63 + 5
    page.close()
    other.close()
