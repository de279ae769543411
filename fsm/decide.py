"""``decide(state, message, facts) → decision``: what a request does when something arrives.

One pure, total table for each role. The scheduler asks it, exploration asks it, and it has a row
for every state, every message and every combination of facts, the late and duplicate ones
included. What is *not* here is policy: who is admitted, readmitted or retracted is a choice of
:mod:`engine.policy`, which exploration treats as free."""

from typing import Final

from fsm.chart import Chart
from fsm.decode_rules import DECODE_BOOK
from fsm.prefill_rules import PREFILL_BOOK
from fsm.rules import Decision, Facts, Message, RuleBook, Table, compile_table
from fsm.unified_rules import UNIFIED_BOOK

BOOKS: Final[dict[str, RuleBook]] = {
    book.chart.name: book for book in (UNIFIED_BOOK, PREFILL_BOOK, DECODE_BOOK)
}
TABLES: Final[dict[str, Table]] = {name: compile_table(book) for name, book in BOOKS.items()}
NO_FACTS: Final = Facts()


def decide(chart: Chart, state: str, message: Message, facts: Facts = NO_FACTS) -> Decision:
    """The one decision for a request in ``state`` on ``message``. Pure and total."""
    return TABLES[chart.name][state, message, facts]
