"""The error with which all ranks end a run after a message error."""

from __future__ import annotations

from ds_quant.comm.checksum import MessageError


def end_of_run(
    error: MessageError, *, receiver: int, step: int, sealed: bool, lossless: bool
) -> RuntimeError:
    """Return the error of a message that rank ``receiver`` cannot use.

    Args:
        sealed: messages carry checksums.
        lossless: weights travel as lossless differences, which writes outside of the optimizer
            make undecodable.
    """
    why = " because quantized_comm.payload_checksum=true" if sealed else ""
    code = " and for code that writes weights outside the optimizer" if lossless else ""
    return RuntimeError(
        f"quantized_comm: step {step}: {error.role} from rank {error.sender} "
        f"{error.problem.format(receiver)}. Training ends{why}; look for faulty memory or a "
        f"faulty network on the hosts of these two{code}, and resume from a checkpoint that "
        "was saved before this step"
    )
