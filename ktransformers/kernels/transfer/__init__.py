"""Order of work between the CPU and GPUs: the driver, copies, experts in the order of a stream.

Nothing in a decode step waits for Python: `AsyncCpuExperts` (`async_cpu_experts.py`) puts a layer's hand-over on the
stream and goes on, and a CUDA graph replays what it put there.

    stream    copy inputs ── hand over ── shared experts, ... ── wait ── copy result
                                │                                ↑
    CPU                   coordinator: forward of the layer on the pool

Copies go to pinned memory that all layers share, which is safe because the stream orders them. Handing over is a
stream memory operation on one word of pinned memory, and a kernel of one warp waits for the word to change (a stream's
own wait ends tens of microseconds late); where the device lacks those operations both are host functions. The protocol
stands in csrc/ops/experts/stream.h, the driver's calls in `cuda.py`. A GPU cannot wake a thread, so whoever starts a
step says how many forwards to expect; until they are done the CPU's threads stay awake. Errors are kept for `check`.
"""
