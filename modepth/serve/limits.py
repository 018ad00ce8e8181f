"""How much a server admits, and how much of each prompt it reads in a step, so that nobody holds up the others."""

from collections.abc import Sequence
from dataclasses import dataclass

from modepth.validation import check_count, check_number

LONGER = 0.3  # the share by which prompts may lengthen the steps in which others generate, on average
STEPS_BETWEEN = 40  # those that read long prompts: so nineteen of twenty are as short as without
SHORT = 4  # pieces, or fewer, of a prompt are read one by one, which makes no step long
UNMEASURED = 8  # tokens


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is admitted, and how much of it is computed in a step.

    requests      admitted at once, computed or waiting
    tokens        of all that are admitted: their prompts, and the most that they may generate
    rows          computed together; the others wait in order
    prompt_alone  tokens that all prompts read in a step at most, and in one in which more wait than generate
    prompt_piece  tokens that they read, on average, in a step in which one row generates. None: a server measures what
                  its machine can read so; an engine by itself takes 8
    row_piece     how many more for each further row that generates; measured with the piece

    >>> Limits(rows=16).rows
    16
    """

    requests: int = 256
    tokens: int = 2**18
    rows: int = 64
    prompt_alone: int = 512
    prompt_piece: int | None = None
    row_piece: float = 0.3

    def __post_init__(self) -> None:
        for name in ("requests", "tokens", "rows", "prompt_alone"):
            check_count(name, getattr(self, name), low=1)
        if self.prompt_piece is not None:
            check_count("prompt_piece", self.prompt_piece, low=1)
        check_number("row_piece", self.row_piece, low=0.0)

    def piece(self, num_generating: int) -> int:
        """Tokens that prompts read beside so many rows that generate."""
        of_one = UNMEASURED if self.prompt_piece is None else self.prompt_piece
        return min(self.prompt_alone, of_one + int(self.row_piece * max(0, num_generating - 1)))


def next_counts(unread: Sequence[int], limits: Limits, rested: int) -> tuple[list[int], int]:
    """How many tokens each row reads, and how many steps ago the last long one then is. Rows that generate read one.
    Prompts share the pieces of the steps since, if these are many; if not, those that have little left share one piece
    and the others wait. Where more wait than generate nobody is spared.

    >>> next_counts([1, 1, 100, 9], Limits(prompt_piece=31), rested=0)
    ([1, 1, 22, 9], 1)
    >>> next_counts([1, 1, 300, 9], Limits(prompt_piece=31), rested=0)
    ([1, 1, 0, 9], 1)
    >>> next_counts([1, 1, 300, 9], Limits(prompt_piece=31), rested=40)
    ([1, 1, 300, 9], 0)
    """
    prompts = [number for number, count in enumerate(unread) if count > 1]
    num_generating = len(unread) - len(prompts)
    piece = limits.piece(num_generating)
    crowd = len(prompts) > num_generating
    if crowd:
        budget = limits.prompt_alone
    elif rested >= STEPS_BETWEEN:
        budget = min(limits.prompt_alone, rested * piece)
    else:
        budget = piece
        # As many as the piece has tokens, since each reads one at least: more would make each step a long one, and the
        # long prompts would wait for as long as short ones come.
        prompts = [number for number in prompts if unread[number] <= SHORT * piece][:piece]
    shares = share_out([unread[number] for number in prompts], budget)
    counts = [int(count == 1) for count in unread]
    for number, share in zip(prompts, shares, strict=True):
        counts[number] = share
    is_long = not crowd and sum(shares) > piece
    return counts, 0 if is_long else rested + 1


def share_out(wanted: Sequence[int], budget: int) -> list[int]:
    """Equal parts of a budget, to nobody more than wanted or less than one: what some leave the others get.

    >>> share_out([100, 3, 100], 43), share_out([5, 5, 5], 2)
    ([20, 3, 20], [1, 1, 1])
    """
    shares = [0] * len(wanted)
    for place, number in enumerate(sorted(range(len(wanted)), key=lambda number: wanted[number])):
        shares[number] = max(1, min(wanted[number], budget // (len(wanted) - place)))
        budget = max(0, budget - shares[number])
    return shares
