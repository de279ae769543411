"""Two requests of a unified node, and what they share, in the middle of a step: see
:mod:`fsm.explore_shared`."""

from typing import Final

from fsm.chart import Edge
from fsm.explore_base import MIXED, Event, Leased, Moved
from fsm.explore_shared_base import FENCE, GUEST, Edges, Life, Node, SharedDesign, name
from fsm.explore_shared_pages import Key, path_of
from fsm.explore_unified_draft import Broken, World
from fsm.ledger import CACHE, Exhausted, LeaseError
from fsm.rules import Facts, Message
from fsm.trace import Balance


class Draft:
    """A node in the middle of a step."""

    def __init__(self, design: SharedDesign, edges: Edges, world: World, node: Node) -> None:
        self.design: Final = design
        self.chart: Final = design.chart
        self._edges: Final = edges
        self.world: Final = world
        self.lives = list(node.lives)
        self.owners, self.tree, self.guest = node.owners, node.tree, node.guest
        self.members, self.retired, self.turn = node.members, node.retired, node.turn
        self.moves: list[Event] = []

    @property
    def locks(self) -> tuple[Key | None, ...]:
        return tuple(life.lock for life in self.lives)

    def frozen(self) -> Node:
        first, second = self.lives
        tree = tuple(sorted(self.tree))
        return Node(
            (first, second), self.owners, tree, self.guest, self.members, self.retired, self.turn
        )

    def change(self, who: int, **changes: object) -> None:
        self.lives[who] = self.lives[who]._replace(**changes)  # type: ignore[arg-type]

    # --- moves ---

    def tell(self, who: int, message: Message) -> None:
        life = self.lives[who]
        facts = Facts(launched=life.launched > 0)
        decision = self.design.table[life.state, message, facts]
        if decision.effect == "refuse":
            raise Broken(f"{message} makes no sense for r{who + 1} in {life.state}")
        if decision.event is not None:
            self.move(who, decision.event, message, decision.by)

    def move(self, who: int, event: str, cause: Message | None = None, by: str = "") -> None:
        """Fire ``event``; what it takes of memory is there already, what it drops is given back."""
        edge, takes, drops = self._edges[self.lives[who].state, event]
        if cause is not None and takes & {"pages", "rows"}:
            raise Broken(f"{cause} takes memory, which may not be there")
        if "prefix_locks" in drops:
            self.change(who, lock=None)
        if "pages" in drops:
            self._give_back(who, edge)
        self._turns(who, takes, drops)
        self._membership(who, takes, drops)
        life, taken = self.lives[who], "pages" in takes
        self.moves.append(
            Moved(
                "unified",
                True,
                event,
                by or edge.by[0],
                cause or "policy",
                who,
                len(life.pages) if taken else 1,
                self.balance() if taken else None,
                life.size,
            )
        )
        answers = life.answers + ("frontend_records" in drops)
        self.lives[who] = life._replace(state=edge.target, answers=answers)

    def settle(self) -> None:
        for who in range(2):
            while (message := self._due(self.lives[who])) is not None:
                if self.design.table[self.lives[who].state, message, Facts()].effect != "fire":
                    break
                self.tell(who, message)

    def _due(self, life: Life) -> Message | None:
        if not life.launched and (life.state, "quiesce") in self.chart.table:
            return "quiet"
        return "continued" if life.state == "held" and self.world.pause is None else None

    # --- what a group and a session count ---

    def _membership(self, who: int, takes: frozenset[str], drops: frozenset[str]) -> None:
        if "group_members" in takes:
            self.members = (*self.members, who)
        elif "group_members" in drops:
            if who not in self.members:
                raise Broken(f"r{who + 1} leaves a group that it is not in")
            self.members = tuple(member for member in self.members if member != who)
            self.retired += not self.members
            if self.retired > 1:
                raise Broken("the group ends twice")

    def _turns(self, who: int, takes: frozenset[str], drops: frozenset[str]) -> None:
        if "session_turns" in takes:
            if self.turn >= 0:
                raise Broken("two turns of one session are in flight")
            self.turn = who
        elif "session_turns" in drops:
            if self.turn != who:
                raise Broken(f"r{who + 1} gives back a turn that it has not got")
            self.turn = -1

    # --- pages ---

    def balance(self) -> Balance:
        return self.design.books.balance(self.owners, self.tree)

    def note(self, what: str, owner: int | str, units: int) -> None:
        self.moves.append(Leased("unified", what, owner, units, self.balance()))

    def take(self, owner: str, count: int) -> tuple[int, ...]:
        try:
            self.owners, pages = self.design.books.take(self.owners, owner, count)
        except (LeaseError, Exhausted) as error:
            raise Broken(str(error)) from error
        return pages

    def share(self, page: int, owner: str) -> None:
        try:
            self.owners = self.design.books.share(self.owners, page, owner)
        except LeaseError as error:
            raise Broken(str(error)) from error

    def drop(self, page: int, owner: str) -> None:
        try:
            self.owners = self.design.books.drop(self.owners, page, owner)
        except LeaseError as error:
            raise Broken(str(error)) from error

    def evict(self, keys: tuple[Key, ...]) -> None:
        """As :meth:`engine.prefix_cache.PrefixCache.evict`: leaves, the deepest first."""
        nodes = dict(self.tree)
        pages = [nodes.pop(key) for key in keys]
        self.tree = tuple(sorted(nodes.items()))
        for page in pages:
            self.drop(page, CACHE)
        if keys:
            self.note("evict", CACHE, len(keys))
        used = [(page, owner) for page in pages for owner in self.owners[page]]
        if used:
            raise Broken("page {} is evicted, which {} owns".format(*used[0]))

    def found(self, who: int) -> tuple[Key, ...]:
        """The nodes of the prefix cache that hold a prefix of the request's tokens."""
        nodes = {key for key, _ in self.tree if self.design.matches(key, self.world.weights)}
        holding = {key[1]: key for key in sorted(nodes)}
        path: list[Key] = []
        for _, what in path_of(self.world.weights, who, self.lives[who].size - 1):
            if what not in holding:
                break
            path.append(holding[what])
        return tuple(path)

    def reserve(self, who: int, evicting: tuple[Key, ...]) -> None:
        """As :meth:`engine.pages.Kv.reserve`: lock, make room, take, share."""
        path = self.found(who)
        nodes, owner = dict(self.tree), name(who)
        shared = tuple(nodes[key] for key in path)
        for key in path:
            if key[0] != self.world.weights:
                raise Broken("KV is found that was computed under other weights")
        self.change(who, lock=path[-1] if path else None)
        self.evict(evicting)
        own = self.take(owner, self.lives[who].size - len(shared))
        for page in shared:
            self.share(page, owner)
        pages, weights = shared + own, self.world.weights
        self.change(who, pages=pages, ready=len(shared), weights=weights)

    def extend(self, who: int, evicting: tuple[Key, ...]) -> None:
        self.evict(evicting)
        pages = self.take(name(who), 1)
        self.change(who, pages=self.lives[who].pages + pages)
        self.note("grow", who, 1)

    def cache_prompt(self, who: int) -> None:
        """As :meth:`engine.pages.Kv.cache_prompt`: others may share it, and it locks it itself."""
        life = self.lives[who]
        if not self.design.may_cache(life.weights, self.world.weights):
            return
        lock = None
        new = 0
        for key, page in zip(self._path(who), life.pages, strict=False):
            known = dict(self.tree).get(key)
            if known is None:
                self._keep(key, page)
                new += 1
            elif known != page:
                break
            lock = key
        if self.design.relocks(life.lock, lock):
            self.change(who, lock=lock)
        if new:
            self.note("cache", who, new)

    def _give_back(self, who: int, edge: Edge) -> None:
        """As :meth:`engine.pages.Kv.give_back`."""
        life = self.lives[who]
        if edge.pages == "cache" and self.design.may_cache(life.weights, self.world.weights):
            new = 0
            for key, page in zip(self._path(who), life.pages, strict=False):
                if key not in dict(self.tree):
                    self._keep(key, page)
                    new += 1
            if new:
                self.note("cache", who, new)
        for page in life.pages:
            self.drop(page, name(who))
        if life.pages:
            self.note("release", who, len(life.pages))
        self.change(who, pages=(), ready=0, weights=0)

    def _path(self, who: int) -> tuple[Key, ...]:
        """The nodes for its committed pages: what is kept is found under the node's weights."""
        life = self.lives[who]
        if life.weights != self.world.weights and life.ready:
            raise Broken("pages go to the prefix cache that were computed under other weights")
        return path_of(self.world.weights, who, life.ready)

    def _keep(self, key: Key, page: int) -> None:
        self.share(page, CACHE)
        self.tree = (*self.tree, (key, page))

    # --- the guest ---

    def guest_takes(self, what: str, evicting: tuple[Key, ...]) -> None:
        self.evict(evicting)
        (page,) = self.take(GUEST, 1)
        self.note("take", GUEST, 1)
        self.guest = what
        if what == "peer":
            self.share(page, FENCE)
            self.note("quarantine", GUEST, 1)

    def guest_leaves(self, loaded: bool) -> None:
        """Its page is loaded (and kept, if nobody else has the same), or is free again."""
        page = next(p for p, owners in enumerate(self.owners) if GUEST in owners)
        key = (self.world.weights, "A")
        if loaded and key not in dict(self.tree):
            self._keep(key, page)
            self.note("cache", GUEST, 1)
        if self.guest == "peer":
            self.drop(page, FENCE)
        self.drop(page, GUEST)
        self.guest = ""
        self.note("release", GUEST, 1)

    # --- weights ---

    def renew(self, in_place: bool) -> None:
        """The weights have changed: what nobody locks is dropped, and the rest is not found."""
        for who, life in enumerate(self.lives):
            if life.pages and not in_place:
                raise Broken(f"weights change under the pages of r{who + 1}, {life.state}")
            if life.pages:
                self.change(who, weights=MIXED)
        self.flush()

    def flush(self) -> None:
        while leaves := self.design.evictable(self.tree, self.locks):
            self.evict(tuple(leaves))
