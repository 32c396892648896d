"""The rounds of a launch agreement: every member of a group speaks once in each.

What a proposal means, and when to make one, is in `core.agreement`.
"""

from collections.abc import Sequence

from rrfp_jax.core.events import Proposal
from rrfp_jax.errors import ProtocolError


class Rounds:
    """Who said what in the round that is open, and early in the next.

    Args:
      member: this process.
      size: of its group.

    Attributes:
      number: of the first round that is not closed here.
    """

    def __init__(self, member: int, size: int) -> None:
        self.number = 0
        self._member = member
        self._size = size
        self._said: dict[int, Proposal] = {}  # in round `number`, by member
        self._early: dict[int, Proposal] = {}  # in the one after, if we spoke in this

    @property
    def has_spoken(self) -> bool:
        """Whether this member has said its proposal of the round."""
        return self._member in self._said

    @property
    def has_begun(self) -> bool:
        """Whether any member has."""
        return bool(self._said)

    def say(self, proposal: Proposal) -> None:
        """Records this member's own proposal."""
        self._said[self._member] = proposal

    def hear(self, member: int, proposal: Proposal) -> None:
        """Records the proposal of another member.

        Raises:
          ProtocolError: it is none of the group, or neither the first of this round nor
            of the next, or of the next before this member has spoken.
        """
        if member == self._member or not 0 <= member < self._size:
            raise ProtocolError(
                f"member {member} proposed to member {self._member} of a group of "
                f"{self._size} ({proposal}).\n"
                "  Give each process of a rank a place of its own in the group."
            )
        open_rounds = [self._said, self._early] if self.has_spoken else [self._said]
        ahead = proposal.round - self.number
        if not 0 <= ahead < len(open_rounds) or member in open_rounds[ahead]:
            raise ProtocolError(
                f"member {member} proposed out of turn ({proposal}): member "
                f"{self._member} is in round {self.number}, in which "
                f"{sorted(self._said)} have spoken, and {sorted(self._early)} in the "
                "next.\n  Give all processes of a rank the same config, and each "
                "message to the step that it was sent in."
            )
        open_rounds[ahead][member] = proposal

    def close(self) -> list[Proposal] | None:
        """Ends the round if all have spoken; returns what they said, by member."""
        if len(self._said) < self._size:
            return None
        told = [self._said[member] for member in range(self._size)]
        self.number += 1
        self._said, self._early = self._early, {}
        return told

    def why_open(self) -> str:
        """Says whom a round in which this member has spoken waits for; "" for none."""
        missing = [m for m in range(self._size) if m not in self._said]
        if not self.has_spoken:
            return ""
        return f"round {self.number} of the group misses {members(missing)}"


def members(some: Sequence[int]) -> str:
    """Returns `member 1` or `members 1, 3`."""
    return f"member{'s' * (len(some) > 1)} {', '.join(map(str, some))}"
