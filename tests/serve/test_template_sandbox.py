"""Chat templates are programs that come with a model. They run in jinja2's sandbox: none reaches Python, and a client
brings none of its own.

What a template costs in time and memory is its model's affair, as is what the weights do: see SECURITY.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from serve.body import parse
from serve.errors import BadRequestError
from serve.openai_protocol import ChatCompletionRequest, TokenizeRequest
from serve.prompts import Prompts
from tests.recordings.build_tokenizers import byte_level

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def prompts(template: str) -> Prompts:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.chat_template = template
    return Prompts(made)


def render(template: str, content: str = "Hi", **kwargs: str) -> str:
    body = {"messages": [{"role": "user", "content": content}], "chat_template_kwargs": kwargs}
    made = prompts(template)
    try:
        return run(made.chat(parse(ChatCompletionRequest, json.dumps(body).encode())))[0]
    finally:
        made.close()


HOSTILE = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['os'].system('true') }}",
    "{{ raise_exception.__code__.co_filename }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}{{ joiner.__init__.__globals__.keys() }}",
    "{{ namespace.__init__.__globals__['os'] }}{{ namespace.__init__.__globals__.x.y }}",
    "{{ self.__init__.__globals__.x.y }}",
    "{{ self._TemplateReference__context.environment.x.y }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ range(10 ** 12) | list }}",
    "{% for i in range(10 ** 12) %}{% endfor %}",
    "{{ 1 / 0 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
]


@pytest.mark.parametrize("template", HOSTILE)
def test_hostile_templates_are_refused(template: str) -> None:
    """Each is one request's 400; the server goes on."""
    with pytest.raises(BadRequestError, match="^The chat template refused the messages") as caught:
        render(template)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("value", ["''", "''.format", "raise_exception", "messages", "namespace()"])
def test_what_the_sandbox_hides_is_empty(value: str) -> None:
    assert render(f"{{{{ {value} | attr('__class__') | attr('__mro__') | list }}}}") == "[]"
    assert render(f"{{{{ {value} | attr('__init__') | attr('__globals__') | list }}}}") == "[]"


def test_what_a_message_says_is_no_template() -> None:
    said = "{{ ''.__class__.__mro__ }}{% for i in range(9) %}x{% endfor %}{# gone #}"
    assert render("{% for m in messages %}{{ m.content }}{% endfor %}", content=said) == said
    assert render("{{ text }}", text="{{ 1 + 1 }}") == "{{ 1 + 1 }}"


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "tools", "documents", "messages", "conversation", "tokenizer_kwargs", "truncation",
     "return_tensors", "return_dict", "continue_final_message", "self"],
)  # fmt: skip
def test_clients_do_not_reach_the_renderer(name: str) -> None:
    """A template of a client would still be in the sandbox, but could run for ever."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {name: "x"}}
    with pytest.raises(BadRequestError, match="is not allowed") as caught:
        run(prompts("{{ x }}").chat(parse(ChatCompletionRequest, json.dumps(body).encode())))
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_clients_bring_no_template() -> None:
    for model in (ChatCompletionRequest, TokenizeRequest):
        with pytest.raises(BadRequestError, match="^chat_template "):
            parse(model, b'{"messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ 1 }}"}')


@pytest.mark.parametrize("name", ["raise_exception", "range", "namespace", "dict", "cycler", "strftime_now", "loop"])
def test_a_client_that_shadows_what_templates_use_breaks_its_own_request(name: str) -> None:
    with pytest.raises(BadRequestError):
        render(f"{{{{ {name}(1)() }}}}", **{name: "x"})
    assert render("{{ messages[0].content }}", **{name: "x"}) == "Hi"
