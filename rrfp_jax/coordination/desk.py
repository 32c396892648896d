"""Sorts the letters of a process, and gathers values from several processes.

One thread, the one that trains, reads all mail: each letter goes to the handler of its
kind. Whoever waits for something keeps reading, so no wait can block another.

A gather among few is direct: each tells all others. Among many it goes through a tree
(`tree`): each waits for what its children have, tells its parent that and its own; the
first member, which then has all, tells its children, and these theirs. So a gather of N
takes 2 (N - 1) letters, not N (N - 1), and a member at most 9 connections a direction.
Either way nobody has the values before all have called, and all wait alike: until the
letters are here, or until the run has ended elsewhere.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from rrfp_jax.coordination import tree
from rrfp_jax.coordination.vigil import Vigil
from rrfp_jax.transport.mail import Letter, Mail

Handler = Callable[[Letter], None]
# Takes what this process says to some others; returns what each says, in their order.
Share = Callable[[Any], Sequence[Any]]
_Key = tuple[bytes, int]  # the name of who gathers, and the how manieth time
_Packed = bytes | memoryview

LARGEST_DIRECT = 8
"""Members of a group that gathers without a tree.

Measured among processes of one host with 2 cores, directly and by the tree: 0.11 and
0.18 ms for 2, 0.37 ms both for 4, 1.3 and 0.6 ms for 8, 5.3 and 1.4 ms for 16. That few
cores hold back the direct one, which takes 0.3 ms of CPU each for 8; with a core each
it should be level there.
"""

_LONGEST_WAIT_S = 0.1  # between two looks at whether a peer was lost


def with_nobody(mine: Any) -> Sequence[Any]:
    """Is the `Share` of a process that is alone."""
    return [mine]


@dataclasses.dataclass(eq=False)
class _Group:
    """Processes that gather, as one of them sees them.

    Attributes:
      members: ascending.
      name: stands for the members in letters, which would else be as long as the group
        is large: a digest, since whoever is no member knows nothing of the group, so
        that nobody could number all of them.
      place: of this process among them, from 0.
      parent: in the tree; None for the first member.
      children: in the tree, ascending.
      num_gathers: begun here.
    """

    members: tuple[int, ...]
    name: bytes
    place: int
    parent: int | None
    children: tuple[int, ...]
    num_gathers: int = 0


def _group(members: tuple[int, ...], process: int) -> _Group:
    place = members.index(process)
    parent, children = tree.place_of(place, len(members))
    return _Group(
        members,
        hashlib.blake2b(msgpack.packb(members), digest_size=12).digest(),
        place,
        None if parent is None else members[parent],
        tuple(members[child] for child in children),
    )


class Desk:
    """The mail of one process, sorted.

    Args:
      process: its index.
      mail: introduced to all others.
      check: raises what has ended the run elsewhere; called while waiting.
      progress: is told when this process begins to wait for others, and when it ends.
      watchdog_s: after so long in a wait, the log says for what.
    """

    def __init__(
        self,
        process: int,
        mail: Mail,
        check: Callable[[], None],
        progress: Callable[[bool], None] = lambda is_idle: None,
        watchdog_s: float = math.inf,
    ) -> None:
        self.process = process
        self.mail = mail
        self._check = check
        self._progress = progress
        self._watchdog_s = watchdog_s
        self._handlers: dict[str, Handler] = {}
        self.handle("gather", self._gathered)
        # What each sender said in the gathers that are not over here.
        self._said: dict[_Key, dict[int, _Packed]] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}

    def handle(self, kind: str, handler: Handler) -> None:
        """Gives all letters of a kind to `handler` from now on."""
        self._handlers[kind] = handler

    def poll(self) -> bool:
        """Hands out all letters that are here; returns whether there were any."""
        letters = self.mail.receive()
        for letter in letters:
            self._handlers[letter.kind](letter)
        return bool(letters)

    def sleep(self, longest_s: float) -> None:
        """Sleeps until a letter comes, at most `longest_s`.

        Raises:
          PeerLost, RemoteError, StallError: the run has ended elsewhere.
        """
        self._check()
        self.mail.wait(min(longest_s, _LONGEST_WAIT_S))

    def until(
        self, is_done: Callable[[], bool], name: Callable[[], str] = lambda: "letters"
    ) -> None:
        """Reads mail until something is true that only others can make so.

        Args:
          is_done: whether it is.
          name: says what is missing, for the log.
        """
        vigil = self.vigil(lambda: f"process {self.process} waits for {name()}")
        while not is_done():
            if not self.poll():
                vigil.waits(is_idle=True)
                self.sleep(_LONGEST_WAIT_S)
        vigil.has_news()

    def vigil(self, explain: Callable[[], str]) -> Vigil:
        """Returns what is to be told while this process waits; see `Vigil`."""
        return Vigil(self._progress, self._watchdog_s, explain)

    def all_gather(self, value: Any, members: Sequence[int]) -> list[Any]:
        """Returns the values of all members, in their order.

        All members call this, with the same members, in the same order. Processes that
        are not members need not know. Through a tree, most members wait for another
        than the one that is late: the log of each names whom it waits for.

        Args:
          value: numbers, strings, bytes, and sequences of them. All but one's own come
            back with tuples for lists.
          members: indices of processes, this one among them; ascending.
        """
        group, key = self._begin(members)
        is_direct = len(group.members) <= LARGEST_DIRECT
        exchange = self._exchanged if is_direct else self._through_tree
        found = exchange(group, key, msgpack.packb(value))
        del self._said[key]
        found[group.place] = value
        return found

    def gather(self, value: Any, members: Sequence[int]) -> list[Any] | None:
        """Returns the values of all members in the first of them, None in the others.

        As `all_gather`, but the others do not wait.
        """
        group, key = self._begin(members)
        first, *others = group.members
        if self.process != first:
            self._tell(first, key, msgpack.packb(value))
            return None
        found = [value, *map(_unpacked, self._wait_for(others, key))]
        del self._said[key]
        return found

    def _begin(self, members: Sequence[int]) -> tuple[_Group, _Key]:
        """Returns who gathers, and the key of this gather."""
        known = tuple(members)
        group = self._groups.get(known)
        if group is None:
            group = self._groups[known] = _group(known, self.process)
        key = (group.name, group.num_gathers)
        group.num_gathers += 1
        return group, key

    def _exchanged(self, group: _Group, key: _Key, packed: bytes) -> list[Any]:
        """Returns what the members of a small group say, but this; all tell all."""
        others = [member for member in group.members if member != self.process]
        for member in others:
            self._tell(member, key, packed)
        found = [*map(_unpacked, self._wait_for(others, key))]
        found.insert(group.place, None)
        return found

    def _through_tree(self, group: _Group, key: _Key, packed: bytes) -> list[Any]:
        """Returns what the members of a large group say, along its tree.

        Up goes what members say, one after the other; down an array of it.
        """
        parts = b"".join([packed, *self._wait_for(group.children, key)])
        if group.parent is None:
            header = msgpack.Packer().pack_array_header(len(group.members))
            whole: _Packed = header + parts
        else:
            self._tell(group.parent, key, parts)
            (whole,) = self._wait_for([group.parent], key)
        for child in group.children:
            self._tell(child, key, whole)
        return [*_unpacked(whole)]

    def _wait_for(self, senders: Sequence[int], key: _Key) -> list[_Packed]:
        """Reads mail until all of these have spoken; returns what they say."""
        said = self._said.setdefault(key, {})
        self.until(
            lambda: all(each in said for each in senders),
            lambda: f"a word of {[each for each in senders if each not in said]}",
        )
        return [said[each] for each in senders]

    def _tell(self, member: int, key: _Key, packed: _Packed) -> None:
        # As a frame, since a body is to be small.
        self.mail.send(member, "gather", key, [packed])

    def _gathered(self, letter: Letter) -> None:
        name, number = letter.body
        (packed,) = letter.frames
        self._said.setdefault((name, number), {})[letter.sender] = packed


def _unpacked(packed: _Packed) -> Any:
    return msgpack.unpackb(packed, use_list=False, strict_map_key=False)
