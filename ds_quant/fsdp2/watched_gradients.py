"""NaN and Inf in the gradients of a model, until these gradients are dropped.

A vote of all ranks finds that some gradient holds NaN or Inf, but not which one: only one rank has
seen it. So the finding stands until all gradients that were reduced before the vote are dropped, or
the optimizers have stepped. Gradients that no optimizer uses do not count: nobody drops them.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.fsdp2.torch_names import FsdpParam

Members = dict[int, FsdpParam]  # parameters by the id of their shard


class WatchedGradients:
    """The gradients of an optimizer step that were reduced and not dropped.

    flags: of the run, see ``fallback.first_nonfinite``. A vote reads and empties them.
    """

    def __init__(self, flags: list[tuple[str, Tensor]]) -> None:
        self._flags = flags
        self._reduced: dict[str, Members] = {}  # by module
        self._found: Members = {}  # the gradients of some of them hold NaN or Inf

    def note(self, title: str, rows: ShardedModule, row: Tensor) -> None:
        """Note the gradients of a module that were reduced and are not added up yet.

        title: of the module.
        rows: the part of the module that has gradients.
        row: the sums, of this rank's shards.
        """
        if _are_dropped(self._reduced.get(title, {})):
            self._forget(title)
        if self._found:
            params = [member.sharded_param for member in rows.members]
            _remove(self._found, [id(param) for param in params if param.grad is None])
        members = self._reduced.setdefault(title, {})
        members.update((id(member.sharded_param), member) for member in rows.members)
        self._flags += [(title, flag) for flag in rows.finite_flags(row)]

    def note_nonfinite(self, parameters: Collection[int]) -> None:
        """Note that a vote has found NaN or Inf.

        parameters: ids of those that optimizers hold; none if no optimizer is left.
        """
        for members in self._reduced.values():
            for parameter, member in members.items():
                if parameter in parameters or not parameters:
                    self._found[parameter] = member

    @property
    def found_nonfinite(self) -> bool:
        """True after NaN or Inf was found, until all gradients are dropped."""
        return not _are_dropped(self._found)

    def drop(self, parameters: Collection[int] | None) -> None:
        """Forget the gradients of parameters, given by their ids; None for all."""
        if parameters is None:
            self.clear()
            return
        for title, members in list(self._reduced.items()):
            _remove(members, parameters)
            if not members:
                self._forget(title)
        _remove(self._found, parameters)

    def clear(self) -> None:
        """Forget all gradients."""
        self._flags.clear()
        self._reduced.clear()
        self._found.clear()

    def _forget(self, title: str) -> None:
        self._reduced.pop(title, None)
        self._flags[:] = [(other, flag) for other, flag in self._flags if other != title]


def _are_dropped(members: Members) -> bool:
    """Return True if no parameter has a gradient: it was dropped by writing None."""
    return all(member.sharded_param.grad is None for member in members.values())


def _remove(members: Members, parameters: Collection[int]) -> None:
    for parameter in list(members):
        if parameter in parameters:
            del members[parameter]
