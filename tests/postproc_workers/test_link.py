"""Post-processing in the front end's own process: the same worker behind a socket of its own."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import zmq

from executor.channel import AddressError, connect_push
from executor.messages import Cancel, Message, Open, Release, StepRecords, WorkerJoined
from executor.proxy import GenerationExecutor
from executor.wire import encode
from postproc_workers.link import InProcessLink
from tests.helpers import CHAT, Client, each, request_of, row, spec_of, tokens
from tests.recordings.build_tokenizers import FOLDER
from tests.recordings.checker import merge_stream

HELLO = tokens("Hello", " world", ",", " the", " answer", " is", " ", "42", ".", "<|end|>")


class Waiting(Client):
    """A client that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.over = asyncio.Event()

    def feed(self, payload: bytes, flags: int) -> None:
        super().feed(payload, flags)
        if self.ended:
            self.over.set()


class Setting:
    """A link, the proxy it feeds, and a socket in the executor's place. sent: what the proxy was asked to pass on."""

    def __init__(self, folder: Path) -> None:
        os.chmod(folder, 0o700)
        self.sent: list[Message] = []
        self.proxy = GenerationExecutor()
        self.proxy.connect_in_process(self.sent.append)
        address = f"ipc://{folder}/worker-0"
        postproc = {
            "tokenizer": str(FOLDER / "byte_level.json"),
            "post_processors": "serve.post_processors:POST_PROCESSORS",
        }
        self.link = InProcessLink({"worker": 0, "address": address, "postproc": postproc}, self.proxy)
        self.link.start()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.executor = connect_push(self.context, address)

    def close(self) -> None:
        self.link.close()
        self.link.close()
        self.context.destroy(linger=0)


def run(folder: Path, scenario: Callable[[Setting], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        setting = Setting(folder)
        try:
            await scenario(setting)
        finally:
            setting.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_frames_reach_the_client(tmp_path: Path) -> None:
    async def scenario(setting: Setting) -> None:
        assert setting.sent == [WorkerJoined(0, f"ipc://{tmp_path}/worker-0")]
        assert setting.proxy.worker_stats[0]["tokens"] == 0  # a first report comes at once
        client, spec = Waiting(), spec_of(CHAT, stop=["answer"])
        setting.proxy.open(request_of(1, spec), client)
        setting.executor.send(encode(StepRecords.build([], [Open(1, 0, 0, spec.encode())])))
        for step in each(HELLO[:-1], rid=1):
            setting.executor.send(encode(StepRecords.build([step])))
        await client.over.wait()
        assert merge_stream(client.body, CHAT).choices[0].content == "Hello world, the "
        assert setting.sent[2:] == [Cancel(0, [(1, 0)]), Release(1)]  # behind WorkerJoined and the request
        assert setting.proxy.open_requests == 0

    run(tmp_path, scenario)


def test_more_frames_than_one_turn_takes(tmp_path: Path) -> None:
    """The socket's descriptor tells of new frames once: what is left must be read without being told again."""

    async def scenario(setting: Setting) -> None:
        client, spec = Waiting(), spec_of(CHAT)
        setting.proxy.open(request_of(1, spec), client)
        setting.executor.send(encode(StepRecords.build([], [Open(1, 0, 0, spec.encode())])))
        for step in [*[row(HELLO[:1], rid=1)] * 1000, row([], "length", rid=1)]:
            setting.executor.send(encode(StepRecords.build([step])))
        await client.over.wait()
        assert merge_stream(client.body, CHAT).choices[0].content == "Hello" * 1000

    run(tmp_path, scenario)


def test_malformed_frames_do_not_stop_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tailrace.worker")

    async def scenario(setting: Setting) -> None:
        client, spec = Waiting(), spec_of(CHAT)
        setting.proxy.open(request_of(1, spec), client)
        for frame in (b"", b"\xc1", encode(Release(1))):
            setting.executor.send(frame)
        setting.executor.send(
            encode(StepRecords.build([row(HELLO[:1], "length", rid=1)], [Open(1, 0, 0, spec.encode())]))
        )
        await client.over.wait()
        assert merge_stream(client.body, CHAT).choices[0].content == "Hello"

    run(tmp_path, scenario)


def test_an_address_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        os.chmod(tmp_path, 0o755)
        link = InProcessLink(
            {"worker": 0, "address": f"ipc://{tmp_path}/worker-0", "postproc": {}}, GenerationExecutor()
        )
        with pytest.raises(AddressError):
            link.start()
        link.close()

    asyncio.run(main())
