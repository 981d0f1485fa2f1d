#!/usr/bin/env python3
"""Majority vote: many answers with a number in them, and the number that most agree on.

Once the outcome is certain, what still runs is cancelled.

    scripts/examples/majority_vote.py [-n 8] [--prompt TEXT] [--engine replay | --url URL]
"""

from __future__ import annotations

import re
import sys

from session import parser, request, run  # isort: skip  # makes the packages importable

from serve.scaffolding import MajorityVoteController, ScaffoldingLlm

CANNED = [
    *("3 + 4 = 7", "It is 7.", "Let us count: 1, 2, 3, 4, 5, 6, 7", "The sum is 8", "7", "7 apples", "That makes 7"),
    "Three apples and four apples are a number of apples that I would now like to think about. It is 9.",
]


def last_number(text: str) -> str | None:
    """The answer in a text: its last number."""
    found = re.findall(r"\d+", text)
    return found[-1] if found else None


def main() -> int:
    """Ask, and show the votes."""
    flags = parser(__doc__, "I have 3 apples and buy 4 more. How many do I have? End with the number.")
    flags.add_argument("-n", type=int, default=8, help="voters (%(default)s)")
    options = flags.parse_args()

    async def ask(llm: ScaffoldingLlm) -> None:
        messages = [{"role": "user", "content": options.prompt}]
        task = await llm.generate_async(messages, options=request(options))
        for answer, votes in sorted(task.details["votes"].items(), key=lambda entry: -entry[1]):
            print(f"{votes:3} x {answer}")
        print(f"answer: {task.details['answer']}, as in: {task.output_str}")

    return run(options, MajorityVoteController(options.n, last_number), ask, CANNED)


if __name__ == "__main__":
    sys.exit(main())
