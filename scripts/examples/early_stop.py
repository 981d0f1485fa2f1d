#!/usr/bin/env python3
"""Early stop: many questions with yes or no as their answer, each cancelled as soon as its text has said which.

What is spared is what the cancelled generations had leave to make and did not.

    scripts/examples/early_stop.py [-n 16] [--prompt TEXT] [--engine replay | --url URL]
"""

from __future__ import annotations

import re
import sys
from collections import Counter

from session import parser, request, run  # isort: skip  # makes the packages importable

from serve.scaffolding import EarlyStopController, ScaffoldingLlm

CANNED = ["Yes, it is, and there is much more to be said about it: " + "much more, " * 30,
          "No. Let me tell at length why not: " + "one thing and another, " * 20]  # fmt: skip
DECISION = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


def main() -> int:
    """Ask, and show the answers and what was spared."""
    flags = parser(__doc__, "Is the earth round? Begin with yes or no, then explain.")
    flags.add_argument("-n", type=int, default=16, help="generations (%(default)s)")
    options = flags.parse_args()
    controller = EarlyStopController(lambda text: DECISION.search(text) is not None, streaming_step=2)

    async def ask(llm: ScaffoldingLlm) -> None:
        messages = [{"role": "user", "content": options.prompt}]
        tasks = await llm.generate([messages] * options.n, options=request(options))
        found = [DECISION.search(task.output_str or "") for task in tasks]
        answers = Counter(match[1].lower() if match else "undecided" for match in found)
        print(", ".join(f"{count} x {answer}" for answer, count in sorted(answers.items())))
        spared = sum(task.details["tokens_spared"] for task in tasks)
        print(f"{spared} of {options.n * options.max_tokens} tokens spared")

    return run(options, controller, ask, CANNED)


if __name__ == "__main__":
    sys.exit(main())
