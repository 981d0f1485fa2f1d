#!/usr/bin/env python3
"""Self-refinement: an answer that must pass a check, here to be short, and is asked for again until it does.

What is wrong with an answer becomes the next message.

    scripts/examples/self_refine.py [--max_words 20] [--rounds 3] [--prompt TEXT] [--engine replay | --url URL]
"""

from __future__ import annotations

import sys

from session import parser, request, run  # isort: skip  # makes the packages importable

from serve.scaffolding import ScaffoldingLlm, SelfRefineController

CANNED = [
    "The sky is blue since the molecules of the air scatter the light of the sun, the more so the shorter its waves.",
    "Air scatters blue light more than red.",
]


def main() -> int:
    """Ask, and show in how many rounds the check passed."""
    flags = parser(__doc__, "Why is the sky blue?")
    flags.add_argument("--max_words", type=int, default=20, help="what the check lets pass (%(default)s)")
    flags.add_argument("--rounds", type=int, default=3, help="at most (%(default)s)")
    options = flags.parse_args()

    def check(text: str) -> str | None:
        words = len(text.split())
        if words <= options.max_words:
            return None
        return f"That has {words} words. Say it in {options.max_words} words or fewer."

    async def ask(llm: ScaffoldingLlm) -> None:
        messages = [{"role": "user", "content": options.prompt}]
        task = await llm.generate_async(messages, options=request(options))
        outcome = "passed" if task.details["passed"] else "did not pass"
        print(f"{outcome} after {task.details['rounds']} rounds\n{task.output_str}")

    return run(options, SelfRefineController(check, options.rounds), ask, CANNED)


if __name__ == "__main__":
    sys.exit(main())
