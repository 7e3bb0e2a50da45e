"""The engine's sockets: messages come from the API processes, and each step's outputs go to those that asked for them."""

from __future__ import annotations

import logging

import msgspec
import zmq

from server import PACKAGE
from server.engine.supervisor.process import EngineSetup, client_address, clients_address
from server.types import (
    AbortRequest,
    ClientOutputs,
    EngineFailed,
    FromEngine,
    GenerateRequest,
    RequestOutput,
    StepOutputs,
    ToEngine,
)

logger = logging.getLogger(f"{PACKAGE}.engine.channel")

LAST_MESSAGE_MS = 1000
"""Time that the engine's process waits at its end for its last message to go out."""


class Channel:
    """Holds two sockets to the API process that supervises the engine, and one to each other one that has sent a request.

    Who sends connects, and who receives binds: a message is queued wherever the other side is not there yet.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._setup = setup
        self._commands: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._events: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        for socket, address in ((self._commands, setup.to_engine), (self._events, setup.from_engine)):
            socket.set_hwm(0)
            socket.connect(address)
        if setup.many_clients:
            self._commands.bind(clients_address(setup.to_engine))
        # The last message says why the engine ends. It gets a second to go out, as nobody may be left to read it.
        self._events.linger = LAST_MESSAGE_MS
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._clients: dict[int, zmq.Socket[bytes]] = {}
        self._removed: set[int] = set()
        self._owners: dict[str, int] = {}
        """Clients other than 0 by the ids of their requests."""
        self.said_ready = False
        """Whether the API process knows that the engine takes requests."""

    def send(self, message: FromEngine) -> None:
        """Send to the API process that supervises the engine; never blocks."""
        self._events.send(self._encoder.encode(message), zmq.DONTWAIT)

    def send_step(self, step: StepOutputs) -> None:
        """Send each output to its client, and the state to the one that supervises the engine; never blocks."""
        if not self._owners:
            self.send(step)
            return
        own: list[RequestOutput] = []
        others: dict[int, list[RequestOutput]] = {}
        for output in step.outputs:
            client = self._owners.get(output.request_id)
            if client is None:
                own.append(output)
                continue
            others.setdefault(client, []).append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        for client, outputs in others.items():
            self._clients[client].send(self._encoder.encode(ClientOutputs(outputs)), zmq.DONTWAIT)
        self.send(StepOutputs(own, step.stats, step.before))

    def receive(self, wait_ms: int) -> list[ToEngine]:
        """All messages that are there; waits up to wait_ms for the first."""
        messages: list[ToEngine] = []
        while self._commands.poll(0 if messages else wait_ms):
            data = self._commands.recv()
            try:
                message = self._decoder.decode(data)
            except msgspec.DecodeError as e:
                logger.error("message from the API not understood: %s", e)
                continue
            if self._is_from_the_living(message):
                messages.append(message)
        return messages

    def remove_client(self, client: int) -> list[str]:
        """Close what leads to a client that has ended; returns the ids of its requests."""
        self._removed.add(client)
        if client in self._clients:
            self._clients.pop(client).close(linger=0)
        ids = [request_id for request_id, owner in self._owners.items() if owner == client]
        for request_id in ids:
            del self._owners[request_id]
        return ids

    def close(self) -> None:
        """Send what is queued and close."""
        for socket in self._clients.values():
            socket.close(linger=0)
        self._commands.close(linger=0)
        self._events.close()
        zmq.Context.instance().term()

    def _is_from_the_living(self, message: ToEngine) -> bool:
        """Note which client sent a request; False for a client that was removed: messages of several may cross."""
        if isinstance(message, GenerateRequest) and message.client:
            if message.client in self._removed:
                return False
            self._owners[message.request_id] = message.client
            if message.client not in self._clients:
                self._clients[message.client] = self._connect(message.client)
        elif isinstance(message, AbortRequest) and self._owners:
            for request_id in message.request_ids:
                self._owners.pop(request_id, None)
        return True

    def _connect(self, client: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(client_address(self._setup.from_engine, client))
        return socket


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
