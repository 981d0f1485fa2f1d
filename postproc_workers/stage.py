"""One output between two rows: ids in, what they add to its text out, cut where a stop string completes.

Where a stop string is cut: the matcher (``stop_strings.py``) finds it in the text; ``Stage`` maps the place to the
token that completed it (``_cut``), and ids, text, logprobs and usage end with that token.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from executor.engines.base import TokenLogprob
from executor.logprob_records import unpack_entry
from executor.messages import Finish
from executor.result import CompletionOutput, Logprob
from postproc_workers.logprobs import StepLogprobs
from postproc_workers.spec import StreamSpec
from postproc_workers.stop_gate import GatedMatcher, gated, read_gate
from postproc_workers.stop_strings import StopMatcher, StopStrings
from postproc_workers.vocabulary import Vocabulary

End = tuple[str, str | int | None]
"""(finish_reason, stop_reason)"""


class News(NamedTuple):
    """What a row adds to its output: text that may be sent, the ids it accounts for, their logprobs and pieces (()
    where nobody asked), and how the output ends, if it does."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprob] = ()
    pieces: Sequence[str] = ()
    end: End | None = None


class Stage:
    """What one output keeps between rows, apart from its ids: incomplete characters, a stop's prefix, a held chunk.

    plain: rows of one id may take a fast lane of ``PostprocWorker``: no hook, held chunk, recording or resume, and
        nobody asks which text a token completed. fast: that was so at the opening, but for a resume.
    gathers: chunks have several tokens, and nobody has to look at each: rows of one id may wait unread, see ``room``.
    waiting: those ids. They are read with the next row that is given to ``Stream.step``.
    watched: it is the second lane then: there are stop strings, or log-probabilities are wanted.
    stops: the matcher, where it alone is watching: a text that it passes may take the first lane after all.
    matcher: looks for the stop strings; None where there are none.
    records: of all tokens that have come, where log-probabilities are wanted; else None.
    silent, silent_end: tokens, and the end, that the client has already.
    finish: the engine's, where it ended the output; None while it is open, and where a stop string or a hook ended it.
    interval: tokens per chunk.
    """

    __slots__ = (
        "index", "plain", "fast", "gathers", "waiting", "watched", "stops", "output", "detokenizer", "matcher",
        "records", "ended", "silent", "silent_end", "interval", "holds", "raw_ids", "finish", "_spec",
        "_shown_stops", "_wants_pieces", "_held", "_raw_finish",
    )  # fmt: skip

    def __init__(
        self,
        output: CompletionOutput,
        spec: StreamSpec,
        vocabulary: Vocabulary,
        stops: StopStrings | None,
        interval: int,
        hooked: bool,
    ) -> None:
        self.detokenizer = vocabulary.detokenizer(
            skip_special_tokens=spec.skip_special_tokens,
            spaces_between_special_tokens=spec.spaces_between_special_tokens,
            continuation=spec.continuation,
            keep=frozenset(spec.visible_tokens),
        )
        self.index, self.output, self.interval = output.index, output, interval
        self.ended = self.holds = False
        self.silent, self.silent_end = 0, False
        self._spec = spec
        self.matcher: StopMatcher | GatedMatcher | None = None
        if stops is not None:
            self.matcher = gated(stops.matcher(), read_gate(spec.stop_gate))
        self._shown_stops = frozenset(spec.stop_token_ids) if spec.include_stop else frozenset()
        self.records: list[bytes] | None = [] if spec.logprobs is not None else None
        self._wants_pieces = spec.token_pieces
        self._held = News("", ())
        self.finish: Finish | None = None
        self.raw_ids: list[int] | None = [] if spec.recording is not None else None
        self._raw_finish: Finish | None = None
        self.watched = self.matcher is not None or self.records is not None
        # Log-probabilities come with every id, and a gate looks at every text.
        self.stops = self.matcher if isinstance(self.matcher, StopMatcher) and self.records is None else None
        asked = self.watched and spec.token_pieces
        simple = not hooked and not spec.recording
        self.plain = self.fast = simple and interval == 1 and not asked
        self.gathers = simple and interval > 1 and not self.watched and not spec.token_pieces
        self.waiting: list[int] = []

    def visible(self, tokens: Sequence[int], finish: Finish | None) -> Sequence[int]:
        """The ids whose text is shown: without the stop token that ended the output, unless the client wants to see
        it."""
        hides = finish is not None and finish.stop_token and tokens and tokens[-1] not in self._shown_stops
        return tokens[:-1] if hides else tokens

    def read(self, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[bytes] | None) -> News:
        """The news of a row, cut behind a stop string that completes in it. Raises TokenError, and has read nothing
        then."""
        visible = self.visible(tokens, finish)
        # The text of a single id is its piece already, as long as nothing is held back.
        self.finish = finish
        if not self.watched and not (self._wants_pieces and len(tokens) != 1):
            text = self.detokenizer.decode(visible) if visible else ""
            if finish is not None:
                text += self.detokenizer.flush()
            return News(text, tokens, end=self._engine_end(finish, tokens))
        pieces = self.detokenizer.pieces(visible)
        if finish is not None and (tail := self.detokenizer.flush()):
            # The tail belongs to the row's last id. Were it given to the last visible one, a stop string or an offset
            # in the text would depend on whether a hidden stop token came in the same row.
            hidden = len(visible) < len(tokens)
            pieces = [*pieces, tail] if hidden or not pieces else [*pieces[:-1], pieces[-1] + tail]
        return self._match(pieces, tokens, finish, logprobs)

    def _match(
        self, pieces: list[str], tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[bytes] | None
    ) -> News:
        text, matcher, end = "".join(pieces), self.matcher, self._engine_end(finish, tokens)
        if matcher is not None:
            text = matcher.feed(text)
            if matcher.matched is not None:
                self.finish = None
                tokens = tokens[: _cut(pieces, matcher.match_end)]
                end = ("stop", matcher.matched)
            elif finish is not None:
                text += matcher.flush()
        entries = self.entries(tokens, logprobs, pieces)
        return News(text, tokens, entries, pieces[: len(tokens)] if self._wants_pieces else (), end)

    def entries(
        self, tokens: Sequence[int], records: Sequence[bytes] | None, pieces: Sequence[str]
    ) -> Sequence[Logprob]:
        """The log-probabilities of a row's tokens. records: of the whole row; it may go on behind a stop string. A
        hidden stop token has no piece."""
        if self.records is None or not records:
            return ()
        self.records += records
        count = len(tokens)
        texts = [*pieces[:count], *[""] * (count - len(pieces))]
        return StepLogprobs(tokens, records[:count], texts)

    def _engine_end(self, finish: Finish | None, tokens: Sequence[int]) -> End | None:
        if finish is None or finish.reason == "error":
            return None
        stopped = finish.stop_token and tokens and tokens[-1] in self._spec.stop_token_ids
        return finish.reason, tokens[-1] if stopped else None

    # -------------------------------------------------------------------------------- chunks of several tokens

    def due(self, news: News) -> bool:
        """Whether a chunk goes out now. The first token and the end always go at once."""
        if news.end is not None or not self.output.token_ids:
            return True
        return len(self._held.token_ids) + len(news.token_ids) >= self.interval

    def hold(self, news: News) -> None:
        """Keep a row's news for a later chunk."""
        self._held, self.holds = self.joined(news), True

    def joined(self, news: News) -> News:
        """The held news and these."""
        if not self.holds:
            return news
        held, self.holds = self._held, False
        pieces = [*(held.pieces or (held.text,)), *(news.pieces or (news.text,))] if self._wants_pieces else ()
        self._held = News("", ())
        return News(
            held.text + news.text,
            [*held.token_ids, *news.token_ids],
            StepLogprobs.of(held.logprobs) + news.logprobs if held.logprobs else news.logprobs,
            pieces,
            news.end,
        )

    @property
    def room(self) -> int:
        """How many ids may be appended to ``waiting``, as they come, before the one that makes a chunk due: valid ones,
        whose rows bring no end. None before the first chunk."""
        if not self.gathers or self.holds or self.ended or self.silent or self.silent_end or not self.output.token_ids:
            return 0
        return self.interval - 1

    def with_waiting(self, tokens: Sequence[int]) -> Sequence[int]:
        """The ids that wait, and a row's: they do not wait any more."""
        tokens = [*self.waiting, *tokens]
        self.waiting.clear()
        return tokens

    # -------------------------------------------------------------------------------- what it has had

    def history(self) -> tuple[array[int], Sequence[TokenLogprob] | None]:
        """All ids that have come, held ones too, and their entries where the request asks for them. An output that a
        stop string ended has those up to its last token: whoever reads them again ends at the same place."""
        ids = self.output.token_ids + array("i", [*self._held.token_ids, *self.waiting])
        records = self.records
        return ids, None if records is None else [unpack_entry(record) for record in records[: len(ids)]]

    # -------------------------------------------------------------------------------- recording

    def keep(self, tokens: Sequence[int], finish: Finish | None) -> None:
        """Keep a row as the engine gave it."""
        assert self.raw_ids is not None
        self.raw_ids += tokens
        self._raw_finish = finish

    def recorded(self) -> dict[str, Any]:
        """The output as an entry of a recording."""
        ids, finish = self.raw_ids or [], self._raw_finish
        # An output that a stop string or a hook ended has no engine finish; a replay stops it at the same place.
        reason = finish.reason if finish else "stop"
        entry: dict[str, Any] = {"index": self.index, "token_ids": ids, "finish_reason": reason}
        if finish is not None and finish.stop_token and ids:
            entry["stop_token_id"] = ids[-1]
        if self.records:
            entry["logprobs"] = [
                {"logprob": _json_float(e.logprob), "top": [[i, _json_float(value)] for i, value in e.top]}
                for e in map(unpack_entry, self.records)
            ]
        return entry


def _json_float(value: float) -> float:
    """JSON has no infinity and no NaN; responses show them as the lowest log-probability there is, which this is
    too."""
    return value if value > -sys.float_info.max else -sys.float_info.max


def _cut(pieces: Sequence[str], end: int) -> int:
    """How many tokens are needed for the first ``end`` characters of the joined pieces."""
    length = 0
    for i, piece in enumerate(pieces):
        length += len(piece)
        if length >= end:
            return i + 1
    return len(pieces)
