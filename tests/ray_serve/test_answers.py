"""The way of answers from replicas to an ingress: real sockets, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from server.ray_serve.answers import Connection, ConnectionLostError, Item, Receiver, Sender

HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[Receiver, Sender]]:
    receiver, sender = Receiver(HOST), Sender()
    try:
        yield receiver, sender
    finally:
        await sender.close()


async def all_of(items: asyncio.Queue[Item]) -> list[Item]:
    found: list[Item] = []
    while (item := await asyncio.wait_for(items.get(), 60)) is not None:
        found.append(item)
    return found


async def test_each_answer_gets_its_messages_in_order() -> None:
    async with pair() as (receiver, sender):
        with contextlib.ExitStack() as stack:
            expected = [stack.enter_context(receiver.expect()) for _ in range(20)]
            sent = {
                number: [{"body": os.urandom(random.randrange(5000)), "n": i} for i in range(30)]
                for number, _ in expected
            }

            async def send(number: int) -> None:
                connection = await sender.connection(await receiver.address())
                for message in sent[number]:
                    connection.put(number, message)
                    await connection.drain()
                    await asyncio.sleep(random.random() / 1000)
                connection.put(number, None)

            received, _ = await asyncio.gather(
                asyncio.gather(*(all_of(items) for _, items in expected)),
                asyncio.gather(*(send(number) for number, _ in expected)),
            )
            assert received == list(sent.values())


async def test_what_nobody_waits_for_is_dropped() -> None:
    async with pair() as (receiver, sender):
        connection = await sender.connection(await receiver.address())
        with receiver.expect() as (gone, _):
            pass
        with receiver.expect() as (number, items):
            connection.put(gone, {"body": b"late"})
            connection.put(number, {"body": b"x"})
            connection.put(number, None)
            assert await all_of(items) == [{"body": b"x"}]


async def test_without_the_token_nothing_arrives() -> None:
    async with pair() as (receiver, sender):
        address = await receiver.address()
        with receiver.expect() as (number, items):
            intruder = await sender.connection(replace(address, token=os.urandom(16)))
            intruder.put(number, {"body": b"x"})
            connection = await sender.connection(address)
            connection.put(number, None)
            assert await all_of(items) == []


async def test_a_closed_connection_is_opened_again() -> None:
    async with pair() as (receiver, sender):
        address = await receiver.address()
        first = await sender.connection(address)
        assert await sender.connection(address) is first
        first.close()
        with receiver.expect() as (number, items):
            second = await sender.connection(address)
            second.put(number, None)
            assert await all_of(items) == []


async def test_answers_are_lost_with_their_connection() -> None:
    """After what came before; an answer that comes from elsewhere, and one that nobody has taken yet, are not."""
    async with pair() as (receiver, sender):
        address = await receiver.address()
        with contextlib.ExitStack() as stack:
            begun, announced, elsewhere, untaken = (stack.enter_context(receiver.expect()) for _ in range(4))
            breaks, other = await sender.connection(address), await Connection.open(address)
            breaks.put(begun[0], {"body": b"x"})
            breaks.put(announced[0], {})
            other.put(elsewhere[0], {})
            breaks.close()
            assert await begun[1].get() == {"body": b"x"}
            for _, items in (begun, announced):
                assert isinstance(await asyncio.wait_for(items.get(), 60), ConnectionLostError)
            other.put(elsewhere[0], {"body": b"y"})
            other.put(elsewhere[0], None)
            assert await all_of(elsewhere[1]) == [{"body": b"y"}]
            assert untaken[1].empty()
            other.close()


async def test_an_ingress_that_is_gone_is_an_error() -> None:
    async with pair() as (receiver, sender):
        address = replace(await receiver.address(), port=1)
        with pytest.raises(ConnectionError):
            await sender.connection(address)
        with pytest.raises(ConnectionError):
            await Connection.open(address)
