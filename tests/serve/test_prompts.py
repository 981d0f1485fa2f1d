"""Messages and texts -> token ids, and back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from serve.body import parse
from serve.errors import BadRequestError
from serve.openai_protocol import ChatCompletionRequest, TokenizeRequest
from serve.prompts import Prompts
from tests.recordings.build_tokenizers import MARKS, SPECIAL, byte_level

T = TypeVar("T")

#: Counts on its messages being in order, and looks at what a client may set.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}({{ tools | length }} tools){% endif %}{% if shout %}!{% endif %}"
    "{% if divide is defined %}{{ 1 // divide }}{% endif %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)


def fast(template: str | None = TEMPLATE) -> PreTrainedTokenizerBase:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.chat_template = template
    return made


class Slow:
    """A tokenizer without a backend of its own, which is used by one thread at a time."""

    chat_template = None
    all_special_ids: list[int] = []
    all_special_tokens = ["<s>"]

    def __init__(self) -> None:
        self.inside = threading.Semaphore(1)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert self.inside.acquire(blocking=False), "two threads at once"
        ids = [0] * add_special_tokens + [ord(char) for char in text]
        self.inside.release()
        return ids

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(fast())


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def chat(*messages: tuple[str, str], **fields: Any) -> ChatCompletionRequest:
    plain = [{"role": role, "content": content} for role, content in messages]
    return parse(ChatCompletionRequest, json.dumps({"messages": plain, **fields}).encode())


def test_a_conversation(prompts: Prompts) -> None:
    text, ids = run(prompts.chat(chat(("system", "Be."), ("user", "Hi, 世界"))))
    assert text == "[system]Be.[user]Hi, 世界<think>"
    assert run(prompts.decode(ids)) == text and ids[-1] == byte_level().token_to_id("<think>")


def test_what_a_template_gets(prompts: Prompts) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert run(prompts.chat(chat(("user", "a"), tools=[tool, tool])))[0] == "[user]a(2 tools)<think>"
    assert run(prompts.chat(chat(("user", "a"), chat_template_kwargs={"shout": True})))[0] == "[user]a!<think>"
    assert run(prompts.chat(chat(("user", "a"), add_generation_prompt=False)))[0] == "[user]a"
    assert (
        run(prompts.chat(chat(("user", "a"), ("assistant", "b"), continue_final_message=True)))[0]
        == "[user]a[assistant]b"
    )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (chat(("tool", "x")), "no tools here"),
        (chat(("user", "x"), chat_template_kwargs={"divide": 0}), "zero"),
        (chat(("user", "x"), chat_template_kwargs={"divide": "a"}), "unsupported"),
    ],
)
def test_what_a_template_refuses_is_a_400(prompts: Prompts, request_: ChatCompletionRequest, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        run(prompts.chat(request_))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["tokenize", "conversation", "chat_template", "messages", "tools", "return_dict"])
def test_arguments_of_the_renderer_are_not_a_clients(prompts: Prompts, name: str) -> None:
    with pytest.raises(BadRequestError, match="not allowed") as caught:
        run(prompts.chat(chat(("user", "x"), chat_template_kwargs={name: "{{ 7 * 7 }}"})))
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_templates_run_in_a_sandbox() -> None:
    spy = Prompts(fast("{{ messages.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(BadRequestError, match="refused"):
        run(spy.chat(chat(("user", "x"))))


def test_without_a_template() -> None:
    bare = Prompts(fast(None))
    assert bare.chat_template == ""
    with pytest.raises(BadRequestError, match="no chat template"):
        run(bare.chat(chat(("user", "x"))))


def test_texts_and_ids(prompts: Prompts) -> None:
    assert run(prompts.texts(["ab", ""])) == [[97, 98], []]
    assert run(prompts.texts([[5, 6], [7]])) == [[5, 6], [7]]
    assert run(prompts.echoes(["ab"])) == ["ab"] and run(prompts.echoes([[97, 98]])) == ["ab"]


def test_truncation_and_padding_of_a_tokenizer_file_are_off() -> None:
    """Some files keep those of their training; a prompt must neither be cut nor filled up."""
    tokenizer = fast()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=6)
    with contextlib.closing(Prompts(tokenizer)) as made:
        assert run(made.texts(["abcdefgh", "a"])) == [list(b"abcdefgh"), [97]]
        assert run(made.chat(chat(("user", "abcdef"), add_generation_prompt=False)))[1] == list(b"[user]abcdef")


def test_each_id_on_its_own(prompts: Prompts) -> None:
    assert run(prompts.strings([195, 169, 33, 195])) == ["\ufffd", "\ufffd", "!", "\ufffd"]
    assert run(prompts.strings([])) == []


def test_special_tokens(prompts: Prompts) -> None:
    assert set(prompts.special_tokens) == {*SPECIAL, *MARKS} and prompts.chat_template == TEMPLATE
    request = parse(TokenizeRequest, b'{"messages": [{"role": "user", "content": "a"}]}')
    assert run(prompts.chat(request))[0] == "[user]a<think>"


def test_other_tokenizers_take_turns() -> None:
    slow = Prompts(Slow(), threads=4)  # type: ignore[arg-type]

    async def main() -> list[list[list[int]]]:
        return await asyncio.gather(*(slow.texts([f"{i}" * 50], i % 2 == 0) for i in range(50)))

    for i, (ids,) in enumerate(run(main())):
        assert ids == [0] * (i % 2 == 0) + [ord(char) for char in f"{i}" * 50]
    assert run(slow.decode([104, 105])) == "hi" and slow.special_tokens == ["<s>"]
    slow.close()


@pytest.mark.parametrize("work", ["texts", "decode"])
def test_the_event_loop_goes_on_meanwhile(prompts: Prompts, work: str) -> None:
    """A long prompt must not delay anybody's next chunk: the tokenizer has to let go of the interpreter's lock."""
    long = {"texts": ["a" * 1_000_000], "decode": [97] * 1_000_000}[work]

    async def main() -> tuple[float, float]:
        task, begin = asyncio.ensure_future(getattr(prompts, work)(long)), time.perf_counter()
        last, longest = begin, 0.0
        while not task.done():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return longest, last - begin

    longest, whole = run(main())
    assert longest < whole / 4  # with the lock held it is most of it


def test_large_bodies_are_parsed_here(prompts: Prompts) -> None:
    assert run(prompts.parse(lambda: threading.current_thread().name)).startswith("prompts")


# ------------------------------------------------------------------------------------------ at once, or in a thread


class Witness(Prompts):
    """Notes which thread encodes."""

    def __init__(self) -> None:
        super().__init__(fast())
        self.threads: list[bool] = []

    def _encode(self, text: str, special: bool) -> list[int]:
        self.threads.append(threading.current_thread() is not threading.main_thread())
        return super()._encode(text, special)


LONG = "a" * 3000
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("request_", "thread"),
    [
        (chat(("system", "Be."), ("user", "Hi")), False),
        (chat(("user", LONG)), True),
        (chat(*[("user", "Hi")] * 9), True),
        (chat(("user", "Hi"), tools=[TOOL]), True),
        (chat(("user", "Hi"), chat_template_kwargs={"shout": True}), True),
        (parse(ChatCompletionRequest, json.dumps({"messages": [{"role": "user", "content": "Hi"}, {
            "role": "assistant", "content": "x", "reasoning": LONG}]}).encode()), True),
    ],
)  # fmt: skip
def test_only_short_prompts_are_made_on_the_event_loop(request_: ChatCompletionRequest, thread: bool) -> None:
    with contextlib.closing(Witness()) as made, contextlib.closing(Prompts(fast())) as plain:
        run(made.chat(request_))
        assert made.threads == [thread]
        assert run(made.chat(request_)) == run(plain.chat(request_))


@pytest.mark.parametrize(("texts", "thread"), [(["ab", "c"], False), ([LONG], True), (["a" * 1500] * 2, True)])
def test_so_are_texts(texts: list[str], thread: bool) -> None:
    with contextlib.closing(Witness()) as made:
        assert run(made.texts(texts)) == [list(text.encode()) for text in texts]
        assert made.threads == [thread] * len(texts)
