"""Sorts the letters of a process, and gathers values from several processes.

One thread, the one that trains, reads all mail: each letter goes to the handler of its
kind. Whoever waits for something keeps reading, so no wait can block another.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack

from rrfp_jax.coordination.vigil import Vigil
from rrfp_jax.transport.mail import Letter, Mail

Handler = Callable[[Letter], None]
# Takes what this process says to some others; returns what each says, in their order.
Share = Callable[[Any], Sequence[Any]]
_Key = tuple[tuple[int, ...], int]  # who gathers, and the how manieth time

_LONGEST_WAIT_S = 0.1  # between two looks at whether a peer was lost


def with_nobody(mine: Any) -> Sequence[Any]:
    """Is the `Share` of a process that is alone."""
    return [mine]


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
        # (members, number) -> what each of them said.
        self._values: dict[_Key, dict[int, Any]] = {}
        self._counts: collections.Counter[tuple[int, ...]] = collections.Counter()

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
        are not members need not know.

        Args:
          value: numbers, strings, bytes, and sequences of them. All but one's own come
            back with tuples for lists.
          members: indices of processes, this one among them; ascending.
        """
        group = tuple(members)
        key = (group, self._counts[group])
        self._counts[group] += 1
        values = self._values.setdefault(key, {})
        values[self.process] = value
        for member in group:
            if member != self.process:
                self._tell(member, key, value)
        self._wait_for(group, values)
        del self._values[key]
        return [values[member] for member in group]

    def gather(self, value: Any, members: Sequence[int]) -> list[Any] | None:
        """Returns the values of all members in the first of them, None in the others.

        As `all_gather`, but the others do not wait.
        """
        group = tuple(members)
        key = (group, self._counts[group])
        self._counts[group] += 1
        if self.process != group[0]:
            self._tell(group[0], key, value)
            return None
        values = self._values.setdefault(key, {})
        values[self.process] = value
        self._wait_for(group, values)
        del self._values[key]
        return [values[member] for member in group]

    def _wait_for(self, group: tuple[int, ...], values: Mapping[int, Any]) -> None:
        """Reads mail until all of a group have spoken."""
        self.until(
            lambda: len(values) == len(group),
            lambda: f"a word of {[each for each in group if each not in values]}",
        )

    def _tell(self, member: int, key: _Key, value: Any) -> None:
        # As a frame, since a body is to be small.
        self.mail.send(member, "gather", key, [msgpack.packb(value)])

    def _gathered(self, letter: Letter) -> None:
        group, number = letter.body
        (packed,) = letter.frames
        value = msgpack.unpackb(packed, use_list=False, strict_map_key=False)
        self._values.setdefault((group, number), {})[letter.sender] = value
