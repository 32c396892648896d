"""The letters in which the processes of a pipeline rank agree on what it launches.

What they say to each other, and what follows, is `core.agreement`; here it is carried.
"""

from collections.abc import Mapping, Sequence

from rrfp_jax.core.agreement import Group
from rrfp_jax.core.events import Proposal, Proposed
from rrfp_jax.errors import ProtocolError
from rrfp_jax.transport import codec
from rrfp_jax.transport.mail import Letter, Mail


class Groups:
    """The groups of a pipeline's ranks, as one process sees them.

    Args:
      mail: of this process; `on_letter` is to be given its letters of kind `kind`.
      kind: of the letters: one for each pipeline.
      process: this one.
      members: by rank, the processes that it spans, ascending.
    """

    def __init__(
        self, mail: Mail, kind: str, process: int, members: Sequence[Sequence[int]]
    ) -> None:
        self._mail = mail
        self._kind = kind
        self._process = process
        self._members = members
        self._step = -1
        self._held: dict[int, list[Letter]] = {}  # by step to come
        self._heard: list[tuple[int, Proposed]] = []

    @property
    def groups(self) -> Mapping[int, Group]:
        """By rank, the group, where this process shares the rank with others."""
        return {
            rank: Group(members.index(self._process), len(members))
            for rank, members in enumerate(self._members)
            if len(members) > 1 and self._process in members
        }

    def begin(self) -> None:
        """Starts the next step, with what others have said in it already."""
        self._step += 1
        self._heard.clear()
        for letter in self._held.pop(self._step, []):
            self.on_letter(letter)

    def propose(self, rank: int, proposal: Proposal) -> None:
        """Tells all other members of a rank."""
        for member in self._members[rank]:
            if member != self._process:
                self._mail.send(member, self._kind, [self._step, rank, proposal])

    def heard(self) -> list[tuple[int, Proposed]]:
        """Returns what others have said since the last call, each with its rank."""
        found, self._heard = self._heard, []
        return found

    def on_letter(self, letter: Letter) -> None:
        """Takes in a proposal.

        Raises:
          ProtocolError: it is none, or its sender has no part in the rank.
        """
        match letter.body:
            case (int(step), int(rank), (int(number), tuple(tasks), int(room))):
                ready = tuple(map(codec.read_task, tasks))
            case _:
                raise ProtocolError(
                    f"process {letter.sender} sent {letter.body!r} for a proposal."
                )
        if not 0 <= rank < len(self._members) or not (
            {letter.sender, self._process} <= set(self._members[rank])
        ):
            raise ProtocolError(
                f"process {letter.sender} has no part in rank {rank}, but proposes "
                f"{letter.body!r} to process {self._process}."
            )
        if step > self._step:
            self._held.setdefault(step, []).append(letter)
        elif step == self._step:
            member = self._members[rank].index(letter.sender)
            proposal = Proposal(number, ready, room)
            self._heard.append((rank, Proposed(member, proposal)))
