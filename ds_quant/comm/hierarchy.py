"""The communicators of a process group that fills several nodes, and its gather over two levels.

[Note: order of the second level] A gather over two levels posts its second level when it is waited
for. DeepSpeed's waits come from sets, in another order on every rank. So a wait first posts the
second level of all gathers that were posted before.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from ds_quant.comm.transport import Communicator, Pending


class HierarchicalCommunicator:
    """The flat communicator of a process group and, if its ranks fill several nodes, two levels.

    flat: all ranks of the group.
    intra: the ranks of this rank's node.
    inter: the ranks of all nodes with this rank's local rank.
    gradients: carries gradients inside the node; ``intra`` if not given. With two communicators
        neither role waits for the other, see [Note: gradients inside a node] of runtime/groups.py.
    node_size: ranks per node.

    intra, inter, gradients and node_size are None for a group that lies in one node, has one rank
    per node, or is not the world.
    """

    def __init__(
        self,
        flat: Communicator,
        intra: Communicator | None = None,
        inter: Communicator | None = None,
        gradients: Communicator | None = None,
    ) -> None:
        self.flat = flat
        self.intra = intra
        self.inter = inter
        self.gradients = gradients or intra
        self.size = flat.size
        self.rank = flat.rank
        self.backend = flat.backend
        self.hop = flat.hop
        self.node_size = None if intra is None or inter is None else intra.size
        self.encoding = flat.encoding
        self.decoding = flat.decoding
        self.empty = flat.empty
        self.unposted: deque[TwoLevelGather] = deque()  # gathers without their second level

    def all_gather(self, payload: Tensor, *, role: str) -> Pending[Tensor] | TwoLevelGather:
        """As ``Communicator.all_gather`` over the whole group.

        With two levels the rows cross between nodes once and are then spread inside the node. The
        result is strided: (nodes, ranks of a node, bytes), see ``slots.row_index``.
        """
        if self.intra is None or self.inter is None:
            return self.flat.all_gather(payload, role=role)
        inter_node = self.inter.all_gather(payload, role=role)
        gather = TwoLevelGather(self.unposted, inter_node, self.intra, self.inter, role)
        self.unposted.append(gather)
        return gather

    def rows_of_gather(self) -> dict[str, int]:
        """Return the rows that ``all_gather`` receives over each link."""
        if self.intra is None or self.inter is None:
            return self.flat.rows_of_gather()
        between, inside = self.inter.rows_of_gather(), self.intra.rows_of_gather()
        return {link: between[link] + self.inter.size * inside[link] for link in between}


class TwoLevelGather:
    """A gather whose rows cross between nodes first, then inside the node.

    See [Note: order of the second level].
    """

    def __init__(
        self,
        unposted: deque[TwoLevelGather],
        inter_node: Pending[Tensor],
        intra: Communicator,
        inter: Communicator,
        role: str,
    ) -> None:
        self._unposted = unposted
        self._inter_node = inter_node
        self._intra_node: Pending[Tensor] | None = None
        self._intra = intra
        self._inter = inter
        self._role = role

    def wait(self) -> Tensor:
        """Return the rows of all ranks, (nodes, ranks of a node, bytes), strided."""
        while self._intra_node is None:
            first = self._unposted.popleft()
            rows = first._inter_node.wait()
            first._intra_node = first._intra.all_gather(rows, role=first._role)
        # Received as (local rank, node, bytes). Decoded where they lie, without a copy.
        received = self._intra_node.wait()
        return received.view(self._intra.size, self._inter.size, -1).transpose(0, 1)
