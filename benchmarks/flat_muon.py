"""DeepSpeed's Muon on matrices that lie end to end in one parameter, AdamW on all else.

As ZeRO-3 runs it from DeepSpeed 0.19.8 on: once per optimizer step, on accumulated gradients.
May import torch and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

MUON_RATE = 10  # times that of AdamW
BETA, BETAS, EPS = 0.95, (0.9, 0.95), 1e-8


def matrices_of(module: nn.Module) -> list[tuple[int, torch.Size]]:
    """First element and shape of what Muon updates among the trained parameters, end to end: the
    matrices but embeddings and the head.
    """
    found, start = [], 0
    for name, p in module.named_parameters():
        if p.requires_grad:
            if p.dim() == 2 and name.split(".")[0] not in ("embedding", "position", "head"):
                found.append((start, p.shape))
            start += p.numel()
    return found


class FlatMuon(torch.optim.Optimizer):
    """``params``: one, fp32, 1-D. ``matrices``: as of ``matrices_of``. ``lr`` is AdamW's."""

    def __init__(
        self,
        params: Iterable[Tensor],
        matrices: Sequence[tuple[int, torch.Size]],
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._matrices = list(matrices)
        (master,) = self.param_groups[0]["params"]
        self._rates = torch.ones_like(master)  # times the group's
        for start, shape in self._matrices:
            self._rates[start : start + shape.numel()] = MUON_RATE

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        (master,) = group["params"]
        rates = group["lr"] * self._rates
        update = self._update(master)
        master.mul_(1 - group["weight_decay"] * rates).sub_(rates * update)

    def _update(self, master: Tensor) -> Tensor:
        """What is subtracted at a rate of 1."""
        gradient, state = master.grad, self.state[master]
        if not state:
            state["step"] = 0
            state["momentum"], state["mean"], state["square"] = torch.zeros(3, master.numel())
        state["step"] += 1
        beta1, beta2 = (1 - beta ** state["step"] for beta in BETAS)  # corrections of the bias
        state["mean"].lerp_(gradient, 1 - BETAS[0])
        state["square"].lerp_(gradient.square(), 1 - BETAS[1])
        update = state["mean"] / beta1 / ((state["square"] / beta2).sqrt() + EPS)
        for start, shape in self._matrices:
            place = slice(start, start + shape.numel())
            momentum = state["momentum"][place].view(shape)
            update[place] = _orthogonal(gradient[place].view(shape), momentum).reshape(-1)
        return update


def _orthogonal(gradient: Tensor, momentum: Tensor) -> Tensor:
    """The update of a matrix; ``momentum`` moves on."""
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    with torch.compiler.set_stance("force_eager"):  # compiling takes minutes
        return muon_update(gradient.clone(), momentum, beta=BETA).float()
