#!/usr/bin/env python3
"""Best of N: several answers to one question, and the one that the model itself finds most likely.

Without a reward that is the mean log-probability of its tokens.

    scripts/examples/best_of_n.py [-n 4] [--shortest] [--prompt TEXT] [--engine replay | --url URL]
"""

from __future__ import annotations

import sys

from session import parser, request, run  # isort: skip  # makes the packages importable

from serve.scaffolding import BestOfNController, GenerationTask, ScaffoldingLlm

CANNED = ["The sky is blue.", "Air scatters blue light most.", "It is blue because of the sea.", "Blue light scatters."]


def shortness(task: GenerationTask) -> float:
    """A reward: the fewer words the better."""
    return -len((task.output_str or "").split())


def main() -> int:
    """Ask, and show all scores and the best answer."""
    flags = parser(__doc__, "Why is the sky blue? Answer in one sentence.")
    flags.add_argument("-n", type=int, default=4, help="candidates (%(default)s)")
    flags.add_argument("--shortest", action="store_true", help="prefer the shortest, not the most likely")
    options = flags.parse_args()
    controller = BestOfNController(options.n, shortness if options.shortest else None)

    async def ask(llm: ScaffoldingLlm) -> None:
        messages = [{"role": "user", "content": options.prompt}]
        best = await llm.generate_async(messages, options=request(options))
        scores = ["failed" if score is None else f"{score:.3f}" for score in best.details["scores"]]
        print(f"scores: {', '.join(scores)}; chosen: {best.details['chosen']}\n{best.output_str}")

    return run(options, controller, ask, CANNED)


if __name__ == "__main__":
    sys.exit(main())
