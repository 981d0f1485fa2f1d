"""Counts of what generations have cost so far, made when they are asked for: a step costs nothing here."""

from __future__ import annotations

from serve.scaffolding.task import GenerationTask, TaskStatus


class Progress:
    """Generations, their tokens, and what was cancelled.

    parent: counts too what is counted here: a request's progress and that of all requests. started, done, failed,
    cancelled: generations. tokens_spared: tokens that cancelled generations had leave to make and did not; an upper
    bound of what was saved, since each might have ended by itself, and exact if none would have.
    """

    def __init__(self, parent: Progress | None = None) -> None:
        self.started = self.done = self.failed = self.cancelled = 0
        self.tokens_spared = 0
        self._parent = parent
        self._prompt_tokens = self._tokens = 0
        self._running: set[GenerationTask] = set()

    @property
    def running(self) -> int:
        """Generations that have not ended."""
        return len(self._running)

    @property
    def completion_tokens(self) -> int:
        """Tokens that have arrived, of running generations too."""
        return self._tokens + sum(task.completion_tokens for task in self._running)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return self._prompt_tokens + sum(task.prompt_tokens for task in self._running)

    def usage(self) -> dict[str, int]:
        """As in the OpenAI API: the sums over all generations, those among them whose result nobody took."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def begin(self, task: GenerationTask) -> None:
        """A generation starts; one that goes on is counted already."""
        if task in self._running:
            return
        for progress in self._chain():
            progress.started += 1
            progress._running.add(task)

    def end(self, task: GenerationTask) -> None:
        """A generation has ended, as its status says."""
        if task not in self._running:
            return
        for progress in self._chain():
            progress._running.discard(task)
            progress._count(task)

    def _chain(self) -> list[Progress]:
        return [self] if self._parent is None else [self, *self._parent._chain()]

    def _count(self, task: GenerationTask) -> None:
        self._prompt_tokens += task.prompt_tokens
        self._tokens += task.completion_tokens
        if task.status is TaskStatus.DONE:
            self.done += 1
        elif task.status is TaskStatus.FAILED:
            self.failed += 1
        else:
            self.cancelled += 1
            if task.max_tokens is not None:
                self.tokens_spared += max(0, task.max_tokens - task.completion_tokens)

    def line(self) -> str:
        """One line for a person."""
        parts = [f"{self.running} running", f"{self.done} done"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.cancelled:
            parts.append(f"{self.cancelled} cancelled ({self.tokens_spared} tokens spared)")
        return f"{self.started} generations: {', '.join(parts)}; {self.completion_tokens} tokens"
