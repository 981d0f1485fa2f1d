#!/usr/bin/env python3
"""Tree search: an answer grown a few tokens at a time, of which the beams with the most different words go on.

The score is any function of the text so far.

    scripts/examples/tree_search.py [--beams 2] [--width 3] [--depth 4] [--prompt TEXT] [--engine replay | --url URL]
"""

from __future__ import annotations

import sys

from session import parser, request, run  # isort: skip  # makes the packages importable

from serve.scaffolding import ScaffoldingLlm, TreeSearchController

CANNED = ["Once there was a mill by the river", "Once once once once", "A mill, a mill, a mill and a mill",
          " whose wheel turned day and night", " and so on and so on", ", the end."]  # fmt: skip


def variety(text: str) -> float:
    """How good a partial answer is: its different words, less those that are repeated."""
    words = text.lower().split()
    return 2.0 * len(set(words)) - len(words)


def main() -> int:
    """Search, and show the best."""
    flags = parser(__doc__, "Tell me about a mill in a few sentences.")
    flags.add_argument("--beams", type=int, default=2, help="kept at each level (%(default)s)")
    flags.add_argument("--width", type=int, default=3, help="continuations of each (%(default)s)")
    flags.add_argument("--depth", type=int, default=4, help="levels at most (%(default)s)")
    flags.add_argument("--step_tokens", type=int, default=16, help="of a continuation (%(default)s)")
    options = flags.parse_args()
    controller = TreeSearchController(variety, options.beams, options.width, options.step_tokens, options.depth)

    async def ask(llm: ScaffoldingLlm) -> None:
        messages = [{"role": "user", "content": options.prompt}]
        task = await llm.generate_async(messages, options=request(options))
        print(f"score {task.details['score']:.0f} after {task.details['levels']} levels\n{task.output_str}")

    return run(options, controller, ask, CANNED)


if __name__ == "__main__":
    sys.exit(main())
