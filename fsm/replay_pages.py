"""The page pool of a replay: who holds how many pages, and what every line must leave behind.

A trace counts pages, it does not number them. What a line says is checked three times: against
what its kind can do (``grow`` takes free pages, ``evict`` frees cached ones), against the balance
of the line before, and against what its owner holds. An owner's *own* pages are those that were
free when it took them, *kept* are those of them that the prefix cache has too; the rest is shared.
"""

from collections.abc import Callable
from typing import Final, Literal

from fsm.ledger import CACHE
from fsm.trace import Balance, Flow, LeaseLine, MoveLine

Report = Callable[[str], None]


class Account:
    """What one owner holds."""

    __slots__ = ("grown", "kept", "kind", "own", "quarantined", "units")

    def __init__(self, kind: Literal["request", "copy", "pin"], units: int, own: int) -> None:
        self.kind: Final = kind
        """A request; a copy that is being made in; or a copy out, which shares pages of others
        beyond those that the prefix cache has."""
        self.units = units
        self.own = own
        self.kept = 0
        self.grown = False
        self.quarantined = False
        """Somebody else may still touch its pages."""


class PageBook:
    """One node's pool. Every method takes a line, reports what does not fit, and believes the
    line's balance from then on."""

    def __init__(self, total: int, report: Report) -> None:
        self.total: Final = total
        self.accounts: Final[dict[str, Account]] = {}
        self.peak = 0
        """The most pages that were neither free nor only cached."""
        self.copied_in = (0, False)
        """The newest copy that ended: its ``seq``, and whether the prefix cache kept any of it."""
        self._report = report
        self._balance = Balance(total, 0, 0)
        self._owned = 0
        self._pins = 0

    def move_takes(self, line: MoveLine, expected: int) -> Account:
        """A move takes the ``expected`` pages of everything its request has to compute."""
        units, flow = line.units, line.flow
        if units != expected:
            self._report(f"takes {units} pages where its tokens need {expected}")
        fresh, reused = -flow.free, -flow.cached
        if fresh < 0 or reused < 0 or fresh + reused > units:
            self._report(
                f"takes {units} pages, of which {fresh} were free and {reused} only cached"
            )
        elif units - fresh > self._balance.kept:
            self._report(
                f"shares {units - fresh} pages of a prefix cache that has {self._balance.kept}"
            )
        account = self._open(line.life, Account("request", units, max(fresh, 0)))
        self._settle(flow, line.pool, 0)
        return account

    def lease(self, line: LeaseLine) -> None:
        """A lease line of pages. Its owner was checked by the caller where it is a request."""
        units = line.units
        if units < 1:
            self._report(f"{line.what} of {units} pages")
        match line.what:
            case "grow" | "take":
                self._expect(line, Flow(-units, 0))
                if line.what == "take" and line.owner not in self.accounts:
                    self._open(line.owner, Account("copy", units, units))
                elif (account := self._known(line)) is not None:
                    if (line.what == "take") != (account.kind == "copy"):
                        self._report(f"{line.what} of pages by a {account.kind}")
                    account.units += units
                    account.own += units
                    account.grown = True
                    self._owned += units
                self._settle(line.flow, line.pool, 0)
            case "cache":
                self._expect(line, Flow(0, 0))
                account = self._known(line)
                if account is not None:
                    account.kept += units
                    if account.kept > account.own:
                        self._report(
                            f"caches {account.kept} pages, of which it took {account.own} itself"
                        )
                self._settle(line.flow, line.pool, units)
            case "release":
                self._release(line)
            case "evict":
                if line.owner != CACHE:
                    self._report(f"evicts pages of {line.owner}")
                self._expect(line, Flow(units, -units))
                self._settle(line.flow, line.pool, -units)
            case "pin":
                if line.flow.free or not -units <= line.flow.cached <= 0:
                    self._report(f"pin of {units} pages moves {_flow(line.flow)}")
                self._open(line.owner, Account("pin", units, 0))
                self._settle(line.flow, line.pool, 0)
            case "quarantine":
                account = self._known(line)
                self._expect(line, Flow(0, 0))
                if account is not None:
                    if account.quarantined:
                        self._report("puts its pages into quarantine twice")
                    if account.units != units:
                        self._report(f"quarantine of {units} pages by one who has {account.units}")
                    account.quarantined = True
                self._settle(line.flow, line.pool, 0)
            case _:
                self._report(f"pages cannot {line.what!r}")
                self._settle(line.flow, line.pool, 0)

    def forget(self, owner: str) -> None:
        """``owner`` has gone without giving its pages back (which was reported)."""
        account = self.accounts.get(owner)
        if account is not None:
            self._close(owner, account)

    def _release(self, line: LeaseLine) -> None:
        account = self._known(line)
        free, cached = line.flow
        if account is not None:
            if account.units != line.units:
                self._report(f"releases {line.units} pages and holds {account.units}")
            self._close(line.owner, account)
            # A page that the cache does not have goes free with its last owner.
            most = account.own - account.kept if account.kind != "pin" else account.units
            least = 0 if account.kind == "pin" or self._pins else most
            if not least <= free <= most:
                self._report(f"frees {free} pages; {most} of its own are not cached")
            shared = line.units - free
            if not 0 <= cached <= shared or (cached != shared and not self.accounts):
                self._report(f"leaves {cached} pages to the cache alone; it had {shared} in common")
            if account.kind == "copy":
                self.copied_in = line.seq, account.kept > 0
        self._settle(line.flow, line.pool, 0)

    def _known(self, line: LeaseLine) -> Account | None:
        account = self.accounts.get(line.owner)
        if account is None:
            twice = " (a double release?)" if line.what == "release" else ""
            self._report(f"{line.what} of {line.units} pages by {line.owner}, who has none{twice}")
        return account

    def _expect(self, line: LeaseLine, flow: Flow) -> None:
        if line.flow != flow:
            self._report(f"{line.what} of {line.units} pages moves {_flow(line.flow)}")

    def _open(self, owner: str, account: Account) -> Account:
        if owner in self.accounts:
            self._report(f"{owner} takes pages and has {self.accounts[owner].units} already")
            self.forget(owner)
        self.accounts[owner] = account
        self._owned += account.units
        self._pins += account.kind == "pin"
        return account

    def _close(self, owner: str, account: Account) -> None:
        del self.accounts[owner]
        self._owned -= account.units
        self._pins -= account.kind == "pin"

    def _settle(self, flow: Flow, after: Balance | None, kept: int) -> None:
        """Compare the line's balance with the one that the flow leads to: free + cached + held +
        quarantined = total, and every page in use has a holder."""
        before_free, before_cached, before_kept = self._balance
        free, cached = before_free + flow[0], before_cached + flow[1]
        kept += before_kept
        if after is None:
            self._report("moves pages and says no balance")
            after = Balance(free, cached, kept)
        self._balance = after
        if free != after[0] or cached != after[1]:
            self._report(
                f"the pool has {after.free} free and {after.cached} cached pages; the lines add"
                f" up to {free} and {cached}"
            )
            return
        if kept != after[2]:
            self._report(f"the prefix cache has {after.kept} pages; the lines add up to {kept}")
            return
        used = self.total - free - cached
        if used > self.peak:
            self.peak = used
        owned = self._owned
        if (
            free < 0
            or cached < 0
            or used < 0
            or used > owned
            or kept < cached
            or kept - cached > used
            or (used == 0 and owned > 0)
        ):
            self._report(
                f"{free} free + {cached} cached + {used} in use of {self.total} pages, of which"
                f" the prefix cache keeps {kept}: owners hold {owned}"
            )


def _flow(flow: Flow) -> str:
    return f"free by {flow.free:+} and cached by {flow.cached:+}"
