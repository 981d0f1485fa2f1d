"""Carries out what controllers yield, on the event loop. One driver per request.

Nothing outlives its generator. What a generator has started is noted until it has ended; on every way out the rest is
aborted at once, and the confirmation awaited in the background (``settling``), so that counts are right in the end and
nobody waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from serve.scaffolding.controller import ParallelProcess, Process
from serve.scaffolding.progress import Progress
from serve.scaffolding.task import GenerationTask, Task, TaskError
from serve.scaffolding.worker import Worker


class Driver:
    """workers: by tag. slots: how many tasks may be at work at once. settling: where confirmations are awaited."""

    def __init__(
        self,
        workers: Mapping[str, Worker],
        slots: asyncio.Semaphore,
        progress: Progress,
        settling: set[asyncio.Task[None]],
    ) -> None:
        self._workers, self._slots, self._progress, self._settling = workers, slots, progress, settling

    async def run(self, process: Process) -> Any:
        """From the first yield to the end; returns what the generator returns, raises what it raises."""
        started: set[GenerationTask] = set()
        failure: TaskError | None = None
        try:
            while True:
                try:
                    wanted = next(process) if failure is None else process.throw(failure)
                except StopIteration as end:
                    return end.value
                failure = await self._carry_out(wanted, started)
        finally:
            for task in started:
                self._release(task)
            process.close()

    async def _carry_out(
        self, wanted: Sequence[Task] | ParallelProcess, started: set[GenerationTask]
    ) -> TaskError | None:
        """Do it; returns what is to be raised in the generator."""
        if isinstance(wanted, ParallelProcess):
            return await self._parallel(wanted)
        if len(wanted) == 1:
            await self._run_task(wanted[0], started)
        else:
            await _run_all(self._run_task(task, started) for task in wanted)
        return None

    async def _run_task(self, task: Task, started: set[GenerationTask]) -> None:
        worker = self._worker(task)
        if task.ended:
            await asyncio.sleep(0)  # a controller that yields it for ever stops nobody else
            return
        async with self._slots:
            if not isinstance(task, GenerationTask):
                await worker.run_task(task)
                return
            started.add(task)
            self._progress.begin(task)
            await worker.run_task(task)
        if task.ended:
            started.discard(task)
            self._progress.end(task)

    def _worker(self, task: Task) -> Worker:
        worker = self._workers.get(task.worker_tag)
        if worker is None:
            raise ValueError(
                f"worker_tag: there is no worker {task.worker_tag!r}; there are {', '.join(self._workers)}"
            )
        return worker

    # -------------------------------------------------------------------------------- side by side

    async def _parallel(self, process: ParallelProcess) -> TaskError | None:
        # Not asyncio.wait: it goes over all that are pending whenever one is done.
        ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        places = {asyncio.create_task(self.run(each)): place for place, each in enumerate(process.generators)}
        for task in places:
            task.add_done_callback(ended.put_nowait)
        try:
            for _ in range(len(places)):
                task = await ended.get()
                failure = _note(process, places[task], task)
                if failure is not None or process.enough():
                    return failure
        finally:
            await _end(places)
        return None

    # -------------------------------------------------------------------------------- ends

    def _release(self, task: GenerationTask) -> None:
        """Nobody will go on with it: abort it now, and count it when that is confirmed."""
        worker = self._worker(task)
        worker.abort(task)
        settle = asyncio.create_task(self._settle(worker, task))
        self._settling.add(settle)
        settle.add_done_callback(self._settling.discard)

    async def _settle(self, worker: Worker, task: GenerationTask) -> None:
        await worker.cancel(task, "its request needs it no more")
        self._progress.end(task)


def _note(process: ParallelProcess, place: int, task: asyncio.Task[Any]) -> TaskError | None:
    """What one generator came to; the error, if it is to be raised."""
    try:
        process.results[place] = task.result()
    except TaskError as error:
        process.errors[place] = error
        return None if process.tolerant else error
    return None


async def _run_all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once; the first exception, and being cancelled, ends the others first."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel what still runs and wait for its end; what was raised has been looked at, or comes of being cancelled."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
