"""An engine whose every cache slot remembers what it is the cache of, and a model that is a hash of the prefix.

    slots[slot] = (salt, all tokens up to and with the slot's own)

The real contents of a slot depend on exactly that, so a step is right when every slot it reads holds the salt and the
prefix of the sequence that reads it. A stale page, a wrong share or a recomputation left out shows at once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from ktransformers.cache.tiers import PAGE, STATE
from ktransformers.core import FinishReason, SamplingParams
from ktransformers.scheduler.config import SchedulerConfig, TierConfig
from ktransformers.scheduler.records import (
    UNKNOWN,
    NewSequence,
    Request,
    RequestUpdate,
    RowResult,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from ktransformers.scheduler.scheduler import Scheduler
from ktransformers.scheduler.tier_records import TierPlan, TierResult

VOCAB_SIZE = 40
EOS = 7


def next_token(token_ids: Sequence[int], seed: int | None) -> int:
    """What the model says after these tokens. Hashes of ints are the same in every process. With an even seed it knows
    the last one only, and so repeats itself, until it remembers all of them for one token."""
    if seed is not None and seed % 2 == 0 and len(token_ids) % 11:
        token_ids = token_ids[-1:]
    return hash((seed, *token_ids)) % VOCAB_SIZE


def often_next_token(token_ids: Sequence[int], seed: int | None) -> int:
    """What a drafter takes for the next token: two times of three it is."""
    return (next_token(token_ids, seed) + (len(token_ids) % 3 == 0)) % VOCAB_SIZE


def make_config(**changes: object) -> SchedulerConfig:
    values = {"num_pages": 16, "page_size": 4, "chunk_size": 8, "max_batch_size": 4, "vocab_size": VOCAB_SIZE}
    return SchedulerConfig(**(values | {"eos_token_ids": (EOS,)} | changes))  # type: ignore[arg-type]


def make_tiers(**changes: object) -> TierConfig:
    values = {"fingerprint": b"m" * 32, "host_pages": 40, "host_states": 20, "page_bytes": 100, "state_bytes": 50}
    files = {"page_file_bytes": 110, "state_file_bytes": 60, "disk_bytes": 0}
    return TierConfig(**(values | files | changes))  # type: ignore[arg-type]


def make_request(
    request_id: str,
    prompt_ids: Sequence[int],
    max_tokens: int | None = 8,
    *,
    priority: int = 0,
    deadline: float | None = None,
    cache_salt: str = "",
    **params: object,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=list(prompt_ids),
        params=SamplingParams(**({"seed": 5, "max_tokens": max_tokens} | params)),  # type: ignore[arg-type]
        priority=priority,
        deadline=deadline,
        cache_salt=cache_salt,
    )


def answer_alone(request: Request, config: SchedulerConfig) -> tuple[list[int], FinishReason]:
    """The answer without a scheduler: the oracle."""
    ends = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else set(config.eos_token_ids))
    tokens, answer = list(request.prompt_ids), list[int]()
    room = config.max_len - len(tokens)
    limit = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
    while True:
        answer.append(next_token(tokens, request.params.seed))
        tokens.append(answer[-1])
        if answer[-1] in ends:
            return answer, FinishReason.STOP
        if len(answer) == limit:
            return answer, FinishReason.LENGTH


@dataclass
class _Run:
    """What the engine keeps of a run: built from its NewSequence and from its own samples only."""

    start: NewSequence
    salt: str
    token_ids: list[int]
    written_len: int | None = None  # None before the first row
    block_table: list[int] = field(default_factory=list)


@dataclass
class FakeDisk:
    """Files, which outlive engines. is_bad: asked before each is read or written. num_done: files done in a step."""

    files: dict[bytes, tuple[int, object]] = field(default_factory=dict)  # depth, contents
    is_bad: Callable[[], bool] = lambda: False
    num_done: Callable[[], int] = lambda: 1000


class FakeTiers:
    """Host slots that remember whose bytes they have, and files that are written and read some steps later."""

    def __init__(self, engine: FakeEngine, disk: FakeDisk):
        self.engine, self.disk = engine, disk
        self.host: dict[tuple[bytes, int], object] = {}
        self.queue: deque[tuple[str, bytes, int, int, object]] = deque()
        self.done: dict[str, list[tuple[bytes, bool]]] = {"write": [], "read": []}
        self.is_listed = False

    def run(self, plan: TierPlan) -> None:
        engine, size = self.engine, self.engine.config.page_size
        if plan.lists:
            assert plan == TierPlan(lists=True)
            self.is_listed = True
        for page, slot in plan.stores:
            self.host[PAGE, slot] = [engine.slots.get(page * size + i) for i in range(size)]
        for source, slot in plan.state_stores:
            self.host[STATE, slot] = engine.states[source]
        busy = {(name[:1], slot) for _, name, _, slot, _ in self.queue}
        empty = {(name[:1], slot) for kind, name, _, slot, _ in self.queue if kind == "read"}
        for slot, page in plan.loads:
            assert (PAGE, slot) not in empty
            for i, content in enumerate(self.host[PAGE, slot]):  # type: ignore[arg-type, var-annotated]
                engine.slots[page * size + i] = content
        for slot, target in plan.state_loads:
            assert (STATE, slot) not in empty
            engine.states[target] = self.host[STATE, slot]  # type: ignore[assignment]
        assert not any((PAGE, slot) in busy for _, slot in plan.stores), "a slot is written while a file is"
        assert not any((STATE, slot) in busy for _, slot in plan.state_stores), "a slot is written while a file is"
        for name, depth, slot in plan.reads:
            self.host[name[:1], slot] = None  # anything
            self.queue.append(("read", name, depth, slot, None))
        for name, depth in plan.deletes:
            self.queue.append(("delete", name, depth, -1, None))
        for name, depth, slot in plan.writes:
            self.queue.append(("write", name, depth, slot, self.host[name[:1], slot]))
        assert not plan.waits or any(kind != "delete" for kind, *_ in self.queue), "nothing to wait for"
        self.work(max(self.disk.num_done(), int(plan.waits)), is_ending=plan.waits)

    def work(self, count: int, *, is_ending: bool) -> None:
        while self.queue and (count > 0 or (is_ending and not any(self.done.values()))):
            count -= 1
            kind, name, depth, slot, content = self.queue.popleft()
            if kind == "delete":
                self.disk.files.pop(name, None)
                continue
            is_good = not self.disk.is_bad()
            if kind == "write" and is_good:
                assert self.host[name[:1], slot] == content, "a slot changed while it was written"
                self.disk.files[name] = depth, content
            elif kind == "read" and is_good:
                assert self.disk.files[name][0] == depth
                self.host[name[:1], slot] = self.disk.files[name][1]
            elif kind == "read":
                self.disk.files.pop(name, None)
            self.done[kind].append((name, is_good))

    def result(self, num_tokens: int) -> TierResult:
        config = self.engine.config.tiers
        assert config is not None
        found = None
        if self.is_listed:
            found = [(name, depth, config.file_bytes(name[:1])) for name, (depth, _) in self.disk.files.items()]
        self.is_listed = False
        reads, self.done["read"] = self.done["read"], []
        writes, self.done["write"] = self.done["write"], []
        return TierResult(row_seconds=0.01 * num_tokens, reads=reads, writes=writes, found=found)


class FakeEngine:
    """Runs steps in order. salt_of: the engine is not told salts; the test is. guess: its drafter, which finds the
    token behind these."""

    guess: Callable[[Sequence[int], int | None], int] = staticmethod(often_next_token)

    def __init__(self, config: SchedulerConfig, salt_of: Callable[[str], str], disk: FakeDisk | None = None):
        self.config, self.salt_of = config, salt_of
        self.num_rows = self.num_accepted = 0
        self.slots: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.states: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.num_skipped = 0  # tokens that states made unnecessary to run
        self.runs: dict[int, _Run] = {}
        self.previous: list[int] = []  # tokens that the step before sampled
        self.previous_id: int | None = None
        self.tiers = None if config.tiers is None else FakeTiers(self, disk or FakeDisk())

    def run(self, plan: StepPlan) -> list[RowResult]:
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)  # as it comes through a socket
        assert self.previous_id in (None, plan.step_id - 1)
        assert plan.rows or plan.tiers is not None
        assert plan.tiers is None or self.tiers is not None
        if plan.tiers is not None and self.tiers is not None:
            assert not (plan.rows and plan.tiers.waits)
            self.tiers.run(plan.tiers)
        self.num_rows += plan.num_tokens
        assert plan.num_tokens <= (self.config.long_chunk_size if plan.is_long else self.config.chunk_size)
        assert len(plan.rows) <= self.config.max_batch_size
        assert len({row.run_id for row in plan.rows}) == len(plan.rows)
        for run_id in plan.ended:
            del self.runs[run_id]
        for start in plan.starts:
            assert start.run_id not in self.runs
            assert start.params.seed is not None
            self.runs[start.run_id] = _Run(start, self.salt_of(start.request_id), list(start.token_ids))
        rows = [self._drafted(row) for row in plan.rows]
        self._write(rows)
        self._advance(rows)
        for row in rows:
            self._read(row)
        sampled = [self._sample(row) for row in rows if row.is_sampled]
        self.previous, self.previous_id = [tokens[-1] for tokens in sampled], plan.step_id
        return [RowResult(first, more=[RowResult(token) for token in more]) for first, *more in sampled]

    def _drafted(self, row: ScheduledSequence) -> ScheduledSequence:
        """The row with its draft tokens, where the engine is to find them: for as long as it may guess."""
        if UNKNOWN not in row.token_ids:
            return row
        assert self.config.drafts_in_engine, "no drafter"
        assert list(row.token_ids[-row.num_drafts :]) == [UNKNOWN] * row.num_drafts
        run = self.runs[row.run_id]
        known = list(run.token_ids)
        for _ in range(row.num_drafts):
            known.append(self.guess(known, run.start.params.seed))
        return msgspec.structs.replace(row, token_ids=[*row.token_ids[: -row.num_drafts], *known[-row.num_drafts :]])

    def _fed(self, row: ScheduledSequence) -> list[int]:
        """All tokens of the row's sequence as the step has them, draft tokens at their end."""
        known = self.runs[row.run_id].token_ids[: row.start + row.num_tokens - row.num_drafts]
        return known + list(row.token_ids[len(row.token_ids) - row.num_drafts :] if row.num_drafts else ())

    def _slot(self, row: ScheduledSequence, position: int) -> int:
        size = self.config.page_size
        return self.runs[row.run_id].block_table[position // size] * size + position % size

    def _write(self, rows: Sequence[ScheduledSequence]) -> None:
        written: set[int] = set()
        for row in rows:
            run = self.runs[row.run_id]
            end = row.start + row.num_tokens
            assert run.written_len in (None, row.start), "a gap or a repetition"
            assert all(0 <= page < self.config.num_pages for page in row.block_table)
            assert row.first_page <= len(run.block_table), "a gap in a block table"
            run.block_table[row.first_page :] = row.block_table
            assert len(run.block_table) == -(-end // self.config.page_size)
            if row.token_source is not None:
                assert not row.token_ids
                assert run.token_ids[row.start :] == [self.previous[row.token_source]], "somebody else's token"
            else:
                assert row.token_ids == self._fed(row)[row.start :]
            assert not row.num_drafts or (row.is_sampled and row.num_tokens == 1 + row.num_drafts)
            fed = self._fed(row)
            for position in range(row.start, end):
                slot = self._slot(row, position)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.slots[slot] = (run.salt, tuple(fed[: position + 1]))
            run.written_len = end - row.num_drafts

    def _advance(self, rows: Sequence[ScheduledSequence]) -> None:
        """The states of recurrent layers: each is that of a prefix, as each slot of the cache is."""
        if not self.config.num_states:
            assert all((row.read_slot, row.write_slot, list(row.saves)) == (-1, -1, []) for row in rows)
            return
        written: dict[int, tuple[str, tuple[int, ...]]] = {}
        readers = {row.read_slot: row.run_id for row in rows if row.read_slot >= 0}
        for row in rows:
            run = self.runs[row.run_id]
            first = self.states.get(row.read_slot) if row.read_slot >= 0 else (run.salt, ())
            assert first == (run.salt, tuple(run.token_ids[: row.start])), f"run {row.run_id} continues another state"
            if row.read_slot not in (-1, row.write_slot):
                self.num_skipped += row.start
            writes = {row.write_slot: row.num_tokens - 1} | {slot: at for at, slot in row.saves}
            assert len(writes) == 1 + len(row.saves), "two states in one slot"
            for slot, at in writes.items():
                assert 0 <= slot < self.config.num_states
                assert slot not in written, "two rows write one state"
                assert readers.get(slot, row.run_id) == row.run_id, "a state is written that another row reads"
                written[slot] = (run.salt, tuple(self._fed(row)[: row.start + at + 1]))
        self.states.update(written)

    def _read(self, row: ScheduledSequence) -> None:
        run, fed = self.runs[row.run_id], self._fed(row)
        for position in range(row.start + row.num_tokens):
            known = run.salt, tuple(fed[: position + 1])
            assert self.slots.get(self._slot(row, position)) == known, f"position {position} of run {row.run_id}"

    def _sample(self, row: ScheduledSequence) -> list[int]:
        """The token behind the last known one, and those behind draft tokens that are right."""
        run = self.runs[row.run_id]
        assert run.written_len == len(run.token_ids), "sampled before the end of what is known"
        drafts = list(row.token_ids[1:]) if row.num_drafts else []
        sampled = [next_token(run.token_ids, run.start.params.seed)]
        run.token_ids.append(sampled[0])
        for draft in drafts:
            if draft != sampled[-1]:
                break
            run.written_len = len(run.token_ids)
            sampled.append(next_token(run.token_ids, run.start.params.seed))
            run.token_ids.append(sampled[-1])
        self.num_accepted += len(sampled) - 1
        return sampled


class Loop:
    """A scheduler and a fake engine, one call at a time; collects what each request was told. Steps take any time."""

    def __init__(self, config: SchedulerConfig, disk: FakeDisk | None = None):
        self.config, self.scheduler = config, Scheduler(config)
        self.disk = disk or FakeDisk()
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.last: dict[str, RequestUpdate] = {}  # only of requests that ended
        self.results: list[tuple[int, list[RowResult], TierResult | None]] = []  # run by the engine, not yet committed
        self.lost: list[tuple[int, list[RowResult], TierResult | None]] = []  # of engines that died
        self.engine = FakeEngine(config, self.salt_of, self.disk)

    def salt_of(self, request_id: str) -> str:
        return self.requests[request_id].cache_salt

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.answers[request.request_id] = list(request.answer_ids)
            self.scheduler.add(request)

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            results = self.engine.run(plan)
            tiers = None if self.engine.tiers is None else self.engine.tiers.result(plan.num_tokens)
            self.results.append((plan.step_id, results, tiers))
        return plan

    def commit(self) -> list[RequestUpdate]:
        step_id, results, tiers = self.results.pop(0)
        seconds = (1 + hash((step_id, 7)) % 100) / 1000
        updates = self.scheduler.commit(StepResult(step_id=step_id, results=results, tiers=tiers, seconds=seconds), 1.0)
        self.scheduler.check_integrity()
        for update in updates:
            self.hear(update)
        return updates

    def hear(self, update: RequestUpdate) -> None:
        request_id = update.request_id
        assert request_id not in self.last, "news after the end"
        answer = self.answers[request_id]
        if update.token_id is not None:
            answer.append(update.token_id)
        assert update.completion_len == len(answer)
        request = self.requests[request_id]
        assert update.prompt_len == len(request.prompt_ids)
        assert update.cached_len < update.prompt_len + bool(request.answer_ids)
        if update.finish_reason is not None:
            self.last[request_id] = update

    def preempt(self, request_id: str) -> bool:
        """Send a running request back to the queue. False when it does not run."""
        seq = self.scheduler._requests.get(request_id)
        if seq is None or seq.run is None:
            return False
        self.scheduler._preempt(seq)
        return True

    def suspend(self, request_id: str) -> bool:
        """Whether it is suspended now. It then holds nothing."""
        was_here = self.scheduler.suspend(request_id)
        assert was_here == (request_id not in self.last)
        assert self.scheduler.is_suspended(request_id) == was_here
        if was_here:
            assert self.scheduler._requests[request_id].run is None
        self.scheduler.check_integrity()
        return was_here

    def resume(self, request_id: str) -> bool:
        """Whether it was suspended."""
        was_suspended = self.scheduler.is_suspended(request_id)
        assert self.scheduler.resume(request_id) == was_suspended
        assert not self.scheduler.is_suspended(request_id)
        self.scheduler.check_integrity()
        return was_suspended

    def crash(self) -> None:
        self.scheduler.engine_lost()
        self.scheduler.check_integrity()
        self.lost, self.results = self.results, []
        self.engine = FakeEngine(self.config, self.salt_of, self.disk)

    def restart(self) -> None:
        """Nothing is left but the disk, the requests, and what they were told: as a service after `kill -9` has it."""
        was_suspended = [name for name in self.requests if self.scheduler.is_suspended(name)]
        self.scheduler, self.results = Scheduler(self.config), []
        self.engine = FakeEngine(self.config, self.salt_of, self.disk)
        for name, request in list(self.requests.items()):
            if name not in self.last:
                self.add(msgspec.structs.replace(request, answer_ids=list(self.answers[name])))
        for name in was_suspended:
            assert self.scheduler.suspend(name)
        self.scheduler.check_integrity()

    def drain(self, depth: int = 2) -> None:
        """Run until nothing is left but what is suspended, with `depth` steps in flight."""
        while self.scheduler.has_work or self.results:
            while len(self.results) < depth and self.schedule() is not None:
                pass
            stats = self.scheduler.stats()
            if not self.results and not stats.num_running + stats.num_waiting:
                break  # tiers have work, which waits for others
            assert self.results, "requests are here, nothing is in flight, and nothing is planned"
            self.commit()

    def check_answers(self) -> None:
        """Every request that ended by itself has the answer it gets alone; the others have a beginning of it."""
        for request_id, request in self.requests.items():
            expected, reason = answer_alone(request, self.config)
            answer, last = self.answers[request_id], self.last.get(request_id)
            if last is not None and last.token_id is not None:
                assert (answer, last.finish_reason) == (expected, reason)
            else:
                assert answer == expected[: len(answer)]


def stir(loop: Loop, rng: random.Random) -> None:
    """Run some steps, two in flight at times, while requests are preempted and suspended; resume all of them."""
    for _ in range(rng.randrange(12)):
        if not loop.results or rng.random() < 0.3:
            loop.schedule()
        if loop.results:
            loop.commit()
        name = rng.choice(list(loop.requests))
        if rng.random() < 0.05:
            loop.preempt(name)
        elif rng.random() < 0.05 and name not in loop.last:
            loop.suspend(name)
    for other in loop.requests:
        loop.resume(other)
