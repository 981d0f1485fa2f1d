"""From token ids to the bytes of a response: detokenizing, stop strings, post-processors, worker processes."""
