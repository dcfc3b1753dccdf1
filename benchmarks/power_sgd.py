"""PowerSGD over simulated ranks, which convergence.py compares with the schemes of DDP.

Vogels et al., NeurIPS 2019. A gradient matrix M of (n, m) elements is sent as P = M Q, (n, rank),
and Q = M^T P, (m, rank), both summed over the ranks; all ranks use P Q^T. The rest, M - P Q^T, is
added to the rank's next gradient, and the next step begins with the Q of this one. Gradients that
would shrink too little are summed as they are. All in fp32, as torch's hook computes with fp32
gradients.
May import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# torch's ``min_compression_rate``: a matrix that shrinks less is sent as it is.
LEAST_COMPRESSION = 2
FP32_BITS = 32


def factor_numel(shape: Sequence[int], rank: int) -> int:
    """Return the elements of P and Q of a gradient, 0 if it is sent as it is."""
    if len(shape) < 2:
        return 0
    rows, columns = _matrix_shape(shape)
    numel = (rows + columns) * min(rows, columns, rank)
    return numel if numel * LEAST_COMPRESSION < rows * columns else 0


def bits_per_element(shapes: Sequence[Sequence[int]], rank: int) -> float:
    """Return the bits that an element costs between two nodes: fp32 sums, sent there and back."""
    sent = 0
    numel = 0
    for shape in shapes:
        own = torch.Size(shape).numel()
        numel += own
        sent += factor_numel(shape, rank) or own
    return 2 * FP32_BITS * sent / numel


class PowerSGD:
    """The sums of all ranks of a data-parallel training, with an error memory per rank.

    parameters: of the model. ranks: number of them. rank: of the factors. seed: of the first Q.
    """

    def __init__(self, parameters: Sequence[Tensor], *, ranks: int, rank: int, seed: int) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        # By parameter and rank, (n, m) fp32.
        self._errors: list[list[Tensor]] = []
        # By parameter, (m, rank) fp32; None: the gradient is sent as it is.
        self._columns: list[Tensor | None] = []
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            shape = parameter.shape
            if not factor_numel(shape, rank):
                self._errors.append([])
                self._columns.append(None)
                continue
            rows, columns = _matrix_shape(shape)
            width = min(rows, columns, rank)
            error = torch.zeros(rows, columns, device=parameter.device)
            self._errors.append([error] * ranks)
            first = torch.randn(columns, width, generator=generator)
            self._columns.append(first.to(parameter.device))

    def reduce(self, gradients: Sequence[Sequence[Tensor]], *, is_last: bool) -> Tensor:
        """Return the mean gradient that all ranks use, 1-D fp32, of all parameters end to end.

        gradients: of every rank, in the shape of the parameters.
        is_last: always True: DDP sends gradients once per optimizer step.
        """
        reduced = []
        for index, of_ranks in enumerate(zip(*gradients, strict=True)):
            own = [gradient.float() for gradient in of_ranks]
            if self._columns[index] is None:
                mean = torch.stack(own).mean(0)
            else:
                mean = self._reduce_matrix(index, own)
            reduced.append(mean.reshape(-1))
        return torch.cat(reduced)

    def _reduce_matrix(self, index: int, gradients: Sequence[Tensor]) -> Tensor:
        """Return P Q^T of one matrix, and keep every rank's error."""
        last_columns = self._columns[index]
        assert last_columns is not None
        shape = _matrix_shape(self._shapes[index])
        matrices = [
            gradient.reshape(shape) + error
            for gradient, error in zip(gradients, self._errors[index], strict=True)
        ]
        directions = _orthogonal(last_columns)
        rows = _orthogonal(torch.stack([matrix @ directions for matrix in matrices]).sum(0))
        columns = torch.stack([matrix.T @ rows for matrix in matrices]).mean(0)
        self._columns[index] = columns
        approximation = rows @ columns.T
        self._errors[index] = [matrix - approximation for matrix in matrices]
        return approximation

    def decoded_weights(self, exact: Sequence[Tensor]) -> list[Tensor]:
        """Return the exact weights, 1-D each, which every rank of DDP holds."""
        return [weights.reshape(-1) for weights in exact]

    def end_step(self) -> None:
        """Go on to the next optimizer step, which begins with the factors of this one."""

    def state(self) -> dict[str, Any]:
        """Return the errors of all ranks and the last Q."""
        return {"errors": self._errors, "columns": self._columns}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a ``state``."""
        self._errors = state["errors"]
        self._columns = state["columns"]


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], torch.Size(shape[1:]).numel()


def _orthogonal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of a matrix."""
    basis, _ = torch.linalg.qr(matrix)
    return basis
