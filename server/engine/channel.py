"""Messages between the engine's process and the API process, over two sockets."""

from __future__ import annotations

import logging

import msgspec
import zmq

from server.engine.supervisor.process import EngineSetup
from server.types import EngineFailed, FromEngine, ToEngine

logger = logging.getLogger(__name__)

LAST_MESSAGE_MS = 1000
"""How long the engine's process waits at its end for its last message to go out."""


class Channel:
    """The engine's two sockets."""

    def __init__(self, setup: EngineSetup) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._commands: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._events: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        for socket, address in ((self._commands, setup.to_engine), (self._events, setup.from_engine)):
            socket.set_hwm(0)
            socket.connect(address)
        # The last message says why the engine ends. It gets a second to go out, as nobody may be left to read it.
        self._events.linger = LAST_MESSAGE_MS
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self.said_ready = False
        """Whether the API process knows that the engine takes requests."""

    def send(self, message: FromEngine) -> None:
        """Send; never blocks."""
        self._events.send(self._encoder.encode(message), zmq.DONTWAIT)

    def receive(self, wait_ms: int) -> list[ToEngine]:
        """All messages that are there; waits up to wait_ms for the first."""
        messages: list[ToEngine] = []
        while self._commands.poll(0 if messages else wait_ms):
            data = self._commands.recv()
            try:
                messages.append(self._decoder.decode(data))
            except msgspec.DecodeError as e:
                logger.error("message from the API not understood: %s", e)
        return messages

    def close(self) -> None:
        """Send what is queued and close."""
        self._commands.close(linger=0)
        self._events.close()
        zmq.Context.instance().term()


def send_from_thread(setup: EngineSetup, message: EngineFailed) -> None:
    """Send a last message from another thread than the engine's, which may wait for other ranks for ever.

    Sockets belong to one thread, so this one has its own.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = context.socket(zmq.PUSH)
    events.connect(setup.from_engine)
    events.send(msgspec.msgpack.encode(message))
    events.close(linger=LAST_MESSAGE_MS)
    context.term()
