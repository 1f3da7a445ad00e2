"""Types of the compiled extension (csrc/bind/bind.cpp). Addresses are integers; sizes are in elements."""

from collections.abc import Sequence
from typing import ClassVar

BF16_COLS: int
F8_E4M3: int
FP8_BLOCK: int
MANY_TOKENS: int
MAX_BF16_DIMS: int
MAX_INDEX_HEADS: int
MAX_THREADS: int
TILE_ROWS: int

def available_isas() -> list[str]: ...
def missing_isas() -> list[str]: ...
def has_bf16(isa: str) -> bool: ...
def layouts() -> dict[str, int]: ...
def kv_types() -> dict[str, int]: ...
def formats() -> list[tuple[int, str, int, int, int, int, int, int, int, tuple[int, ...], int]]: ...
def group_types() -> dict[str, tuple[int, int, int]]: ...
def activation_kinds() -> dict[str, int]: ...
def scoring_kinds() -> dict[str, int]: ...
def set_grid(type: int, values: bytes) -> None: ...
def num_allocations() -> int: ...

class WorkerPool:
    def __init__(self, places: list[tuple[int, list[int], bool]], isa: str, planes: int) -> None: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_bound(self) -> int: ...
    @property
    def num_jobs(self) -> int: ...
    def rest_slow(self, rests: bool) -> None: ...
    def close(self) -> None: ...
    def start_profile(self, ring_bytes: int) -> Profile: ...
    def stop_profile(self) -> None: ...
    def _slow_down(self, thread: int, times: int) -> None: ...
    def _hold(self, thread: int, is_held: bool) -> None: ...
    def _run_counted(self, count: int, stopped: int, awaited: Sequence[int]) -> list[int]: ...
    def _run_failing(self, count: int, failing: int) -> None: ...
    def _run_both(self, count: int, failing: int) -> int: ...

PROFILE_RING_BYTES: int

def profile_parts() -> list[str]: ...
def set_profile_scope(layer: int, part: int) -> tuple[int, int]: ...

class Profile:
    def begin_step(self, step: int, rows: int, keep: Sequence[int]) -> None: ...
    def end_step(self, step: int) -> None: ...
    def drain(self) -> bytes: ...
    @property
    def num_dropped(self) -> int: ...
    def _write_ops(self, threads: int, each: int) -> None: ...

def share_tasks(ends: list[int], places: list[tuple[int, list[int], bool]]) -> list[tuple[int, int]]: ...
def linear(
    pool: WorkerPool,
    x: int,
    tokens: int,
    weight: int,
    type: int,
    layout: int,
    rows: int,
    cols: int,
    bias: int,
    out: int,
) -> None: ...
def packed_tile_bytes(type: int, cols: int) -> int: ...
def pack(pool: WorkerPool, weights: list[int], type: int, rows: int, cols: int, out: int) -> None: ...
def pack_fp8(pool: WorkerPool, weights: list[tuple[int, int]], rows: int, cols: int, out: int) -> None: ...
def transcode(type: int, blocks: int, count: int, out: int) -> None: ...
def write_group_blocks(
    codes: int,
    is_paired: bool,
    scales: int,
    piece_bytes: int,
    zeros: int,
    numbers: int,
    sizes: tuple[int, int, int, int, int],
    out: int,
) -> None: ...
def read_ahead(data: int, bytes: int) -> None: ...
def note_file(data: int, bytes: int, fd: int) -> None: ...
def forget_file(data: int) -> None: ...
def drop_cached(data: int, bytes: int) -> None: ...
def pack_times() -> tuple[int, int]: ...
def copy_parts(pool: WorkerPool, parts: list[tuple[int, int]], out: int) -> None: ...
def trim_heap() -> None: ...
def batched_linear(
    pool: WorkerPool, x: int, tokens: int, batch: int, weight: int, type: int, rows: int, cols: int, out: int
) -> None: ...
def dequantize_rows(
    pool: WorkerPool, weight: int, type: int, rows: int, cols: int, ids: int, count: int, out: int
) -> None: ...
def gather_rows(
    pool: WorkerPool, parts: list[tuple[int, int]], type: int, cols: int, ids: int, count: int, out: int
) -> None: ...
def rms_norm(pool: WorkerPool, x: int, weight: int, rows: int, cols: int, eps: float, out: int) -> None: ...
def read_bandwidth(pool: WorkerPool, data: int, bytes: int, repeats: int) -> float: ...
def int8_peak(pool: WorkerPool, repeats: int) -> float: ...
def fp32_peak(pool: WorkerPool, repeats: int) -> float: ...
def bf16_peak(pool: WorkerPool, repeats: int) -> float: ...
def activate(
    pool: WorkerPool, kind: int, alpha: float, limit: float, gate: int, up: int, count: int, out: int
) -> None: ...

_Projection = tuple[int, int, int, list[int], int, int]

class Moe:
    def __init__(
        self, gate: _Projection, up: _Projection, down: _Projection, kind: int, alpha: float, limit: float, layer: int
    ) -> None: ...
    def forward(self, pool: WorkerPool, x: int, tokens: int, ids: int, weights: int, top_k: int, out: int) -> None: ...

class ExpertCounts:
    def __init__(self) -> None: ...
    def watch(self, layer: int, moe: Moe) -> None: ...
    def add(self, layer: int, rows: Sequence[int], calls: int) -> None: ...
    def follow(self, rows: int, before: int, layers: int, experts: int) -> None: ...
    def totals(self) -> tuple[int, int, int]: ...
    def take(self) -> bytes: ...

def choose_positions(
    pool: WorkerPool,
    q: int,
    weights: int,
    k: int,
    sizes: tuple[int, int, int, int, int],
    block_table: int,
    table: tuple[int, int, int, int],
    seq_ids: int,
    kv_lens: int,
    scale: float,
    choice: tuple[int, int, int],
    slots: int,
    counts: int,
) -> None: ...
def attention(
    pool: WorkerPool,
    q: int,
    kv_type: int,
    k: int,
    v: int,
    scales: tuple[int, int, int, int, int, int, int],
    out: int,
    sizes: tuple[int, int, int, int, int, int],
    strides: tuple[int, int, int, int, int, int],
    block_table: int,
    table: tuple[int, int, int, int],
    seq_ids: int,
    kv_lens: int,
    scale: float,
    softcap: float,
    window: int,
    is_chunked: bool,
    sinks: int,
    bf16_products: bool,
) -> None: ...
def write_kv(
    pool: WorkerPool,
    kv_type: int,
    x: int,
    slots: int,
    cache: int,
    scales: int,
    sizes: tuple[int, int, int, int, int],
    strides: tuple[int, int, int, int, int, int],
) -> None: ...

MAX_CONV_WIDTH: int
_Step = tuple[int, int, int, int, int, int, int]

def causal_conv(
    pool: WorkerPool, step: _Step, addresses: Sequence[int], sizes: Sequence[int], is_silu: bool
) -> None: ...
def scan_heads(
    pool: WorkerPool,
    step: _Step,
    addresses: Sequence[int],
    strides: Sequence[int],
    sizes: tuple[int, int, int, int],
    kind: int,
    eps: float,
    scale: float,
) -> None: ...
def selective_scan(
    pool: WorkerPool, step: _Step, addresses: Sequence[int], strides: Sequence[int], sizes: tuple[int, int]
) -> None: ...
def gated_norm(
    pool: WorkerPool,
    addresses: Sequence[int],
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int],
    eps: float,
    gate_first: bool,
    kind: int,
) -> None: ...
def delta_gates(pool: WorkerPool, addresses: Sequence[int], rows: int, heads: int) -> None: ...

_Weight = tuple[int, int, int, int, int]
_Norm = tuple[int, float]
_Rows = tuple[int, int, int, int, int, int]
_Sizes = tuple[int, int, int, int, int]
_Memory = tuple[int, int, int, int, int, int, bool]

class LayerBuffers:
    def __init__(self) -> None: ...

class RouterSpec:
    def __init__(
        self,
        *,
        top_k: int,
        scoring: int,
        num_groups: int,
        topk_groups: int,
        is_top2: bool,
        is_renormalized: bool,
        scaling: float,
    ) -> None: ...

def route(
    pool: WorkerPool, spec: RouterSpec, logits: int, bias: int, tokens: int, experts: int, ids: int, weights: int
) -> None: ...

class AttentionBlock:
    def __init__(
        self,
        norms: list[_Norm],
        weights: list[_Weight],
        biases: list[int],
        sizes: list[int],
        scale: float,
        has_gate: bool,
        layer: int,
    ) -> None: ...
    def forward(
        self, pool: WorkerPool, buffers: LayerBuffers, x: int, rows: _Rows, sizes: _Sizes, cache: _Memory
    ) -> None: ...

class LatentBlock:
    def __init__(
        self,
        norms: list[_Norm],
        weights: list[_Weight],
        biases: list[int],
        sizes: list[int],
        scale: float,
        latent_scale: float,
        is_interleaved: bool,
        layer: int,
    ) -> None: ...
    def forward(
        self, pool: WorkerPool, buffers: LayerBuffers, x: int, rows: _Rows, sizes: _Sizes, cache: _Memory
    ) -> None: ...

class DeltaNetBlock:
    def __init__(
        self,
        norms: list[_Norm],
        weights: list[_Weight],
        addresses: list[int],
        sizes: list[int],
        l2norm_eps: float,
        gate: int,
        is_tiled: bool,
        layer: int,
    ) -> None: ...
    def forward(self, pool: WorkerPool, buffers: LayerBuffers, step: _Step, x: int, conv: int, states: int) -> None: ...

def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]: ...
def uniform_at(seed: int, position: int) -> float: ...
def sample_rows(
    pool: WorkerPool,
    logits: list[tuple[int, int, int]],
    settings: list[tuple[float, float, float, float]],
    top_k: list[int],
    vocab: int,
) -> list[tuple[int, int]]: ...
def sample_candidates(
    pool: WorkerPool,
    candidates: list[tuple[int, int, int]],
    settings: list[tuple[float, float, float, float]],
    top_k: list[int],
    vocab: int,
) -> list[int]: ...
def token_logprobs(
    pool: WorkerPool,
    logits: int,
    rows: int,
    vocab: int,
    ids: int,
    count: int,
    out: int,
    top_ids: int,
    top: int,
) -> None: ...
def _row_weights(pool: WorkerPool, logits: int, vocab: int, temperature: float, out: int) -> None: ...

class MoeBlock:
    def __init__(
        self,
        norm: _Norm,
        router: _Weight,
        bias: int,
        spec: RouterSpec,
        experts: Moe,
        shared: list[_Weight],
        kind: int,
        alpha: float,
        limit: float,
        layer: int,
    ) -> None: ...
    def forward(self, pool: WorkerPool, buffers: LayerBuffers, rows: int, x: int, ids: int) -> None: ...

class MlpBlock:
    def __init__(
        self, norm: _Norm, gate: _Weight, up: _Weight, down: _Weight, kind: int, alpha: float, limit: float, layer: int
    ) -> None: ...
    def forward(self, pool: WorkerPool, buffers: LayerBuffers, rows: int, x: int) -> None: ...

class LayerStack:
    def __init__(
        self, layers: list[tuple[AttentionBlock | LatentBlock | DeltaNetBlock, MoeBlock | MlpBlock]]
    ) -> None: ...
    def bind(self, memories: list[_Memory]) -> None: ...
    def forward(
        self, pool: WorkerPool, buffers: LayerBuffers, x: int, rows: _Rows, sizes: _Sizes, states: _Step
    ) -> None: ...

class ExpertStream:
    def __init__(self, pool: WorkerPool, addresses: list[int], sizes: list[int], kinds: list[bool]) -> None: ...
    submit_address: ClassVar[int]
    wait_address: ClassVar[int]
    @property
    def has_error(self) -> bool: ...
    @property
    def failed_layer(self) -> int: ...
    @property
    def num_forwards(self) -> int: ...
    @property
    def busy_seconds(self) -> float: ...
    def add_layer(self, moe: Moe) -> int: ...
    def word_of(self, layer: int, rows: int, is_padded: bool) -> int: ...
    def call_of(self, word: int) -> int: ...
    def expect(self, count: int) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...
