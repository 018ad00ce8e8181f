"""Text token by token, as it can be shown while they still come: no half characters, nothing of a stop text."""

from collections.abc import Sequence

from modepth.tokenizer import UNKNOWN, Tokenizer

LONGEST_CHARACTER = 4  # bytes, each of which may be a token


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds, together the text of all: a character of several tokens is that of its last.

    >>> from modepth.tokenizer import ByteTokenizer
    >>> token_texts(ByteTokenizer(), list("aé!".encode()))
    ['a', '', 'é', '!']
    """
    return TextStream(tokenizer).token_texts(tokens, last=True)


class StopStart:
    """How much of the start of a stop text the text ends with, as it grows: a step for each character, however long
    the stop is (Knuth, Morris and Pratt's).

    >>> start = StopStart("aab")
    >>> [start.read(character) for character in "aaac"]
    [1, 2, 2, 0]
    """

    def __init__(self, stop: str) -> None:
        self.stop, self.length = stop, 0
        # By the length of a start of the stop: the longest shorter one that it ends with. Grown as starts are met.
        self.shorter = [0, 0]

    def read(self, character: str) -> int:
        self.length = self.longer(self.length, character)
        if self.length == len(self.shorter):
            self.shorter.append(self.longer(self.shorter[-1], character))
        return self.length

    def longer(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self.shorter[length]
        return length + (self.stop[length] == character)


class TextStream:
    """Hands out the text of growing tokens; `stopped` once a stop text has come up.

    >>> from modepth.tokenizer import ByteTokenizer
    >>> stream = TextStream(ByteTokenizer(), stops=["END"])
    >>> [stream.add(byte) for byte in "aé ENDE".encode()]
    ['a', '', 'é', ' ', '', '', '', '']
    >>> stream.stopped
    True
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.tokens: list[int] = []
        # The text of the tokens before `settled` will not change. Those from `context` on are decoded again with each
        # new one, not all of them: a tokenizer may write a token otherwise at the start of a text.
        self.text, self.context, self.settled = "", 0, 0
        self.shown = 0  # characters handed out
        self.end: int | None = None  # where a stop text begins
        self.starts, self.watched = [StopStart(stop) for stop in self.stops], 0  # characters that they have read

    @property
    def stopped(self) -> bool:
        return self.end is not None

    def add(self, token: int) -> str:
        """The text that this token makes certain."""
        if self.stopped:
            return ""
        self.tokens.append(token)
        text = self.whole_text()
        if not text.endswith(UNKNOWN):  # what the bytes of a character decode to while some are missing
            self.text, self.context, self.settled = text, self.settled, len(self.tokens)
        # None begins in what was handed out: the start of a stop text is held back.
        found = [place for place in (text.find(stop, self.shown) for stop in self.stops) if place >= 0]
        if found:
            self.end = min(found)
            return self.hand_out(text[: self.end])
        return self.hand_out(text[: self.certain(text)])

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        return "" if self.stopped else self.hand_out(self.whole_text())

    def token_texts(self, tokens: Sequence[int], *, last: bool) -> list[str]:
        """The text that each next token makes certain; that of the `last` one has what is then held back."""
        texts = [self.add(token) for token in tokens]
        if last and texts:
            texts[-1] += self.finish()
        return texts

    def whole_text(self) -> str:
        before = self.tokenizer.decode(self.tokens[self.context : self.settled])
        return self.text + self.tokenizer.decode(self.tokens[self.context :])[len(before) :]

    def hand_out(self, text: str) -> str:
        new = text[self.shown :]
        self.shown = max(self.shown, len(text))
        return new

    def certain(self, text: str) -> int:
        """How much of the text no later token changes: not a broken character, not the start of a stop text."""
        sure = len(text)
        while sure > max(0, len(text) - LONGEST_CHARACTER) and text[sure - 1] == UNKNOWN:
            sure -= 1
        for character in text[self.watched : sure]:
            for start in self.starts:
                start.read(character)
        self.watched = max(self.watched, sure)
        return sure - max((start.length for start in self.starts), default=0)
