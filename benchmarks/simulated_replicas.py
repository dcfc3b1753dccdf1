"""The ways of summing of HSDP and DDP for simulated.py: every node holds a replica of the model.

Gradients are summed inside the nodes, then between them with the gradient codec of the scheme, and
sent back with gradients.returned_bits. The collectives are those of ds_quant.fsdp2, with the whole
model in one sharded module; each rank has a thread, because ranks wait for each other. HSDP gathers
weights inside the node; DDP has all weights on every rank and sends none. May import torch,
simulated and the plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from simulated import Network, SimulatedRun
from torch import Tensor, nn

from ds_quant.fsdp2.context import Context
from ds_quant.fsdp2.gradients import QuantizedReduceScatter
from ds_quant.fsdp2.ranks import STAGE
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.fsdp2.weights import QuantizedAllGather
from ds_quant.policy.memory import Sizes
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme
from ds_quant.runtime.front import Workload
from ds_quant.runtime.param import Param
from ds_quant.runtime.run import Level

WAYS = ("hsdp", "ddp")
NO_GROUP = cast(Any, None)  # in place of a process group, which the collectives do not read


class SimulatedModel:
    """The collectives of FSDP2's front on one rank, without FSDP2."""

    def __init__(self, module: nn.Module, routes: Routes, rank: int, network: Network) -> None:
        self.step = 0
        params = [
            Param(
                index=index,
                name=name,
                shape=parameter.shape,
                trained=True,
                tensor=parameter,
                routes=routes,
            )
            for index, (name, parameter) in enumerate(module.named_parameters())
        ]
        self.run = SimulatedRun(
            self,
            routes,
            params,
            rank=rank,
            network=network,
            device=next(module.parameters()).device,
        )
        # No optimizer of torch moves the weights.
        self._context = Context(
            run=self.run,
            before_gather=lambda _: None,
            after_reduction=lambda: None,
        )
        self._backward = SimpleNamespace(is_last_backward=True)
        sharded = _sharded(module, params, self.run.world, self._backward)
        self.reduction = QuantizedReduceScatter(self._context, sharded)
        self.reduction.note_gradients([True] * len(params))
        self.gather = QuantizedAllGather(self, self._context, sharded, node_shard=None)

    @property
    def counted_steps(self) -> int:
        """Optimizer steps."""
        return self.step

    def workload(self) -> Workload:
        """Raise RuntimeError: nobody prices a simulation."""
        raise RuntimeError("a simulated model has no prices")

    def sizes(self) -> Sequence[Sizes]:
        """Raise RuntimeError: nobody predicts the memory of a simulation."""
        raise RuntimeError("a simulated model has no sizes")

    def set_last_backward(self, is_last: bool) -> None:
        """Declare the next backward the last one of the optimizer step, or not."""
        self._backward.is_last_backward = is_last

    def end_step(self) -> None:
        """Go on to the next optimizer step."""
        self.step += 1
        self._context.weights_version = (self.step, 0)
        self.reduction.after_step()


def _sharded(
    module: nn.Module, params: Sequence[Param], level: Level, backward: SimpleNamespace
) -> ShardedModule:
    """Describe the module as FSDP2 shards it, in chunks of dim 0, all parameters in one row.

    level: the ranks that share it. backward: has FSDP2's ``is_last_backward``.
    """
    widths = []
    lengths = []
    for parameter in module.parameters():
        numels = [chunk.numel() for chunk in chunks(parameter.detach(), level.shards.size)]
        widths.append(numels[0])
        lengths.append(tuple(numels))
    parameters = list(module.parameters())
    dtype = parameters[0].dtype
    wrapped = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_state_ctx=backward))
    members = [SimpleNamespace(sharded_param=parameter) for parameter in parameters]
    group = SimpleNamespace(
        fsdp_params=members,
        all_reduce_grads=True,
        gradient_divide_factor=None,
        mesh_info=None,
        post_forward_mesh_info=None,
        _all_gather_comm=None,
        _reduce_scatter_comm=None,
    )
    return ShardedModule(
        module=cast(Any, wrapped),
        name="",
        params=params,
        members=cast(Any, members),
        group=cast(Any, group),
        is_outermost=True,
        level=level,
        widths=tuple(widths),
        lengths=tuple(lengths),
        dtypes=(dtype,) * len(parameters),
        gradient_dtype=dtype,
        fsdp_gathers="",
        was_trained=[True] * len(parameters),
    )


def chunks(values: Tensor, count: int) -> list[Tensor]:
    """Cut dim 0 into ``count`` chunks of which the last ones may be shorter or empty."""
    found = list(values.chunk(count))
    return found + [values[:0]] * (count - len(found))


class Replicas:
    """All ranks of a simulation whose nodes hold replicas.

    way: one of WAYS.
    """

    def __init__(self, module: nn.Module, scheme: Scheme, network: Network, way: str) -> None:
        topology = network.topology
        if way not in WAYS:
            raise ValueError(f"sums={way!r}: allowed: zero3, {', '.join(WAYS)}")
        if topology.nodes == 1 or topology.node_size == 1:
            raise ValueError(
                f"sums={way!r} with {topology.nodes} x {topology.node_size} ranks: allowed: "
                "several nodes of several ranks; take sums=zero3"
            )
        if scheme.level_steps:
            raise ValueError(f'sums={way!r} with weights.levels="learned": allowed: "uniform"')
        routes = Routes(
            scheme=scheme,
            stage=STAGE,
            nodes=topology.nodes,
            node_size=topology.node_size,
            replicas=True,
        )
        self._gathers_weights = way == "hsdp"
        self._node_size = topology.node_size
        self._fronts = [
            SimulatedModel(module, routes, rank, network) for rank in range(topology.world)
        ]

    def reduce(self, gradients: Sequence[Sequence[Tensor]], *, is_last: bool) -> Tensor:
        """Return the mean gradient, 1-D, of all parameters end to end.

        Before the last backward the sums may stay inside the nodes. Then the result is zeros, and
        they are part of that of the last backward.

        gradients: of every rank, in the shape of the parameters.
        is_last: True in the last backward of an optimizer step.
        """

        def reduced(front: SimulatedModel) -> Tensor:
            front.set_last_backward(is_last)
            rows = self._rows(gradients[front.run.world.hierarchy.rank])
            output = torch.zeros_like(rows[0])  # padding is not written
            front.reduction(output, torch.cat(rows), NO_GROUP, dist.ReduceOp.AVG)
            front.reduction.all_reduce(None, output)  # between nodes; None: no hook of a user
            return output

        reduced_rows = _on_all(reduced, self._fronts)
        first_node = reduced_rows[: self._node_size]
        for rank, row in enumerate(reduced_rows):
            if not torch.equal(row, first_node[rank % self._node_size]):
                raise RuntimeError(f"gradients of rank {rank} differ from those of the first node")
        return torch.cat(self._whole(torch.cat(first_node), gradients[0]))

    def decoded_weights(self, exact: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights that the ranks compute with, 1-D each.

        exact: the exact weights in their shapes.
        """
        if not self._gathers_weights:
            return [weights.reshape(-1) for weights in exact]
        rows = self._rows(exact)

        def gathered(front: SimulatedModel) -> Tensor:
            output = rows[0].new_empty(len(rows) * rows[0].numel())
            front.gather(output, rows[front.run.world.hierarchy.rank], NO_GROUP)
            return output

        return self._whole(_on_all(gathered, self._fronts[: self._node_size])[0], exact)

    def _rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return FSDP2's row of every rank of a node: its padded chunks, end to end."""
        rows = []
        for local in range(self._node_size):
            row = []
            for tensor in tensors:
                pieces = chunks(tensor, self._node_size)
                padded = pieces[0].new_zeros(pieces[0].numel())
                padded[: pieces[local].numel()] = pieces[local].reshape(-1)
                row.append(padded)
            rows.append(torch.cat(row))
        return rows

    def _whole(self, rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the rows of a node, end to end; 1-D, without padding.

        like: tensors of their shapes.
        """
        by_rank = rows.view(self._node_size, -1)
        whole = []
        offset = 0
        for tensor in like:
            pieces = chunks(tensor, self._node_size)
            found = []
            for local, piece in enumerate(pieces):
                found.append(by_rank[local, offset : offset + piece.numel()])
            whole.append(torch.cat(found))
            offset += pieces[0].numel()
        return whole

    def end_step(self) -> None:
        """Go on to the next optimizer step."""
        for front in self._fronts:
            front.end_step()

    def state(self) -> dict[str, Any]:
        """Return the number of optimizer steps."""
        return {"step": self._fronts[0].step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a ``state``."""
        for front in self._fronts:
            front.step = state["step"]


def _on_all(
    work: Callable[[SimulatedModel], Tensor], fronts: Sequence[SimulatedModel]
) -> list[Tensor]:
    """Return the results of all fronts, each made by a thread."""
    with ThreadPoolExecutor(len(fronts)) as pool:
        futures = [pool.submit(work, front) for front in fronts]
        return [future.result() for future in futures]
