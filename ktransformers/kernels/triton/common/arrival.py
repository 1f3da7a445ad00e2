"""The program of a launch that comes last, and finds what all others have stored."""

from __future__ import annotations

from ktransformers.kernels.triton.common.runtime import jit, tl

__all__ = ["arrive_last"]


@jit
def arrive_last(counter, count):
    """Count this program in; whether it is the last of `count` to come here: that one finds what the others stored
    before.

    The counter is 0 before and after. Loads of the others' results must bypass L1 (cache_modifier ".cg").
    """
    tl.debug_barrier()  # the stores of all threads of this program come before its arrival
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if is_last:
        tl.store(counter, 0)
    return is_last
