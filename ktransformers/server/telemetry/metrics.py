"""The metrics of /metrics: vLLM's names, which existing dashboards read, and our own. Knows a backend's figures.

https://docs.vllm.ai/en/latest/usage/metrics.html. Histograms are observed where answers pass (answers/generations.py);
everything else is read from the backend when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ktransformers.core import FinishReason, GenerationStats
from ktransformers.scheduler.tier_records import TierStats
from ktransformers.server.backend.balance_stats import BalanceStats, ClusterStats
from ktransformers.server.backend.base import BackendInterfaceBase

__all__ = ["Counts", "Metrics", "Refusals", "render_together"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0)
_STORED = {
    "hits": "Of {} in files that steps used: found in RAM.",
    "misses": "Of {} in files that steps used: had to be read.",
    "read_bytes": "Read from files of {}.",
    "wait_seconds": "Time that steps waited for {} from files.",
    "read_errors": "Reads of {} that failed.",
}
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class _BackendCollector(Collector):
    """Reads the backend at the moment of the scrape."""

    def __init__(self, backend: BackendInterfaceBase, model_name: str):
        self._backend, self._model_name = backend, model_name

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def collect(self) -> Iterator[Metric]:
        stats = self._backend.stats()
        yield self._gauge("vllm:num_requests_running", "Requests that are computed now.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait to be computed.", stats.num_waiting)
        yield self._gauge("ktransformers:num_requests_suspended", "Requests that are set aside.", stats.num_suspended)
        yield self._gauge("vllm:kv_cache_usage_perc", "K/V cache in use; 1 is all of it.", stats.cache_usage)
        if isinstance(stats, BalanceStats):
            yield from self._of_processes(stats)
        if isinstance(stats, ClusterStats):
            yield from self._of_replicas(stats)

    def _of_replicas(self, stats: ClusterStats) -> Iterator[Metric]:
        yield self._gauge("ktransformers:replicas", "Replicas that report.", len(stats.replicas))
        yield self._counter(
            "ktransformers:requests_taken_over", "Answers that went on at another replica.", stats.num_taken_over
        )
        families = [
            GaugeMetricFamily(f"ktransformers:replica_{name}", text, labels=["model_name", "replica"])
            for name, text in (
                ("requests_running", "Requests that a replica computes now."),
                ("requests_waiting", "Requests that wait at a replica."),
                ("kv_cache_usage_perc", "K/V cache of a replica in use; 1 is all of it."),
            )
        ]
        hits = CounterMetricFamily(
            "ktransformers:replica_prefix_cache_hits",
            "Prompt tokens found in the prefix cache of a replica.",
            labels=["model_name", "replica"],
        )
        for one in stats.replicas:
            labels, known = [self._model_name, one.name], one.stats
            for family, value in zip(families, (known.num_running, known.num_waiting, known.cache_usage), strict=True):
                family.add_metric(labels, value)
            if known.scheduler is not None:
                hits.add_metric(labels, known.scheduler.prefix_hit_len)
        yield from (*families, hits)

    def _of_processes(self, stats: BalanceStats) -> Iterator[Metric]:
        engine, restarts = stats.engine, stats.num_engine_restarts
        if stats.scheduler is not None:
            queried, hit = stats.scheduler.prefix_query_len, stats.scheduler.prefix_hit_len
            yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queried)
            yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", hit)
            yield self._counter("vllm:num_preemptions", "Requests sent back to wait.", stats.scheduler.num_preemptions)
            expired = stats.scheduler.num_expired
            yield self._counter("ktransformers:requests_expired", "Requests whose deadline passed.", expired)
            if stats.scheduler.tiers is not None:
                yield from self._of_tiers(stats.scheduler.tiers)
        yield self._counter("ktransformers:engine_restarts", "Engines that died and were replaced.", restarts)
        yield self._counter(
            "ktransformers:requests_poisonous", "Requests ended for killing engines.", engine.num_poisoned
        )
        yield self._counter("ktransformers:engine_steps", "Steps that the engine ran.", engine.num_steps)
        yield self._counter("ktransformers:engine_tokens", "Tokens in those steps.", engine.num_tokens)
        yield self._counter("ktransformers:engine_busy_seconds", "Time that those steps took.", engine.busy_seconds)
        rows = engine.num_expert_rows
        yield self._counter("ktransformers:expert_rows", "(token, expert) pairs computed, all layers.", rows)
        touched = engine.num_touched_experts / max(engine.num_expert_samples, 1)
        yield self._gauge("ktransformers:experts_touched", "Distinct experts per layer and step.", touched)
        for name, text, value in (
            ("reads", "Experts that decode steps used, of layers with slots on a GPU.", engine.num_hot_reads),
            ("hits", "Those of them that had a slot.", engine.num_hot_hits),
            ("uploads", "Experts copied to slots.", engine.num_hot_uploads),
            ("upload_bytes", "Copied to slots.", engine.hot_upload_bytes),
        ):
            yield self._counter(f"ktransformers:hot_expert_{name}", text, value)
        pictures, seconds = engine.num_tower_pictures, engine.tower_seconds
        yield self._counter("ktransformers:tower_pictures", "Pictures that the tower computed.", pictures)
        yield self._counter("ktransformers:tower_seconds", "Time that the tower took for them.", seconds)
        for kind, what, counts in (
            ("expert", "experts", engine.stored),
            ("row", "rows of tables", engine.stored_rows),
        ):
            for (name, text), count in zip(_STORED.items(), counts, strict=True):
                yield self._counter(f"ktransformers:stored_{kind}_{name}", text.format(what), count)

    def _of_tiers(self, tiers: TierStats) -> Iterator[Metric]:
        for tier, used, most in (
            ("host", tiers.host_bytes, tiers.max_host_bytes),
            ("disk", tiers.disk_bytes, tiers.max_disk_bytes),
        ):
            yield self._gauge(f"ktransformers:kv_{tier}_bytes", f"Pages and states in the {tier} tier.", used)
            yield self._gauge(f"ktransformers:kv_{tier}_max_bytes", f"Most bytes of the {tier} tier.", most)
        for name, text, value in (
            ("host_hits", "Prompt tokens that host memory had.", tiers.host_hit_len),
            ("disk_hits", "Prompt tokens that files had.", tiers.disk_hit_len),
            ("recomputed", "Prompt tokens that a tier had, computed because that was faster.", tiers.recomputed_len),
            ("stored_bytes", "Copied from the cache to host memory.", tiers.stored_bytes),
            ("loaded_bytes", "Copied from host memory to the cache.", tiers.loaded_bytes),
            ("written_bytes", "Written to files.", tiers.written_bytes),
            ("read_bytes", "Read from files.", tiers.read_bytes),
            ("read_errors", "Files that could not be used; computed instead.", tiers.num_read_errors),
            ("write_errors", "Pages and states that could not be written.", tiers.num_write_errors),
        ):
            yield self._counter(f"ktransformers:kv_tier_{name}", text, value)


class Refusals(Collector):
    """Counts of requests that were answered with an error status, whichever part of the server has refused them."""

    def __init__(self) -> None:
        self._by_status: dict[int, int] = {}

    def count(self, status: int) -> None:
        """Count one more refused request. status: of HTTP, 400 or more."""
        self._by_status[status] = self._by_status.get(status, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Yield the counter of refused requests, by HTTP status."""
        family = CounterMetricFamily(
            "ktransformers:requests_refused", "Requests answered with an error, by HTTP status.", labels=["status"]
        )
        for status, number in sorted(self._by_status.items()):
            family.add_metric([str(status)], number)
        yield family


@dataclass(slots=True)
class Counts:
    """Counts of answers and tokens since the start, as they happen. prompt_tokens: computed, not found in the cache;
    counted at the first token. draft_tokens: run for answers; accepted_tokens: those of them that are the answers'.
    pictures: that were read.
    """

    num_started: int = 0
    num_finished: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    pictures: int = 0


class Metrics:
    """The metrics of one app, with a registry of its own."""

    def __init__(self, backend: BackendInterfaceBase, model_name: str):
        self.counts = Counts()
        self.registry = CollectorRegistry()
        self.registry.register(_BackendCollector(backend, model_name))
        self._labels = {"model_name": model_name}
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens of an answer.")
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end of the answer.")
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._answer_tokens = self._counter("vllm:generation_tokens", "Tokens of answers.")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that steps ran.")
        self._accepted_tokens = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted: they are tokens of answers."
        )
        self.picture_read = self._histogram("ktransformers:picture_read_seconds", "Fetching and decoding a picture.")
        pictures = Counter(
            "ktransformers:pictures",
            "Pictures of requests, by what became of them.",
            ["model_name", "outcome"],
            registry=self.registry,
        )
        self._pictures = {one: pictures.labels(**self._labels, outcome=one) for one in ("read", "left_out", "refused")}
        self._success = Counter(
            "vllm:request_success", "Answers that ended.", ["model_name", "finished_reason"], registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        made = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return made.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(**self._labels)

    def picture(self, outcome: str) -> None:
        """Count a picture of a request. outcome: read, left_out or refused."""
        self.counts.pictures += outcome == "read"
        self._pictures[outcome].inc()

    def drafted(self, num_drafted: int, num_accepted: int) -> None:
        """Count draft tokens that were run, and those of them that were accepted."""
        self.counts.draft_tokens += num_drafted
        self.counts.accepted_tokens += num_accepted
        self._draft_tokens.inc(num_drafted)
        self._accepted_tokens.inc(num_accepted)

    def finished(self, reason: FinishReason, stats: GenerationStats, seconds: float) -> None:
        """Count an answer that ended after `seconds`."""
        self.counts.num_finished += reason is not FinishReason.ABORT
        self._success.labels(**self._labels, finished_reason=reason.value).inc()
        self._latency.observe(seconds)
        self._prompt.observe(stats.prompt_len)
        self._answer.observe(stats.completion_len)
        self._prompt_tokens.inc(stats.prompt_len)
        self._answer_tokens.inc(stats.completion_len)

    def render(self, more: Collector) -> tuple[bytes, str]:
        """Return the metrics as text, and its content type. more: collects further metrics, of the backend."""
        return render_together([self], more)


def _rendered(registry: CollectorRegistry) -> tuple[bytes, str]:
    encode, content_type = choose_encoder("text/plain")
    return encode(registry), content_type


class _Together(Collector):
    """Samples of one name are one family, whoever they come from."""

    def __init__(self, sources: Sequence[Collector]):
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for source in self._sources:
            for one in source.collect():
                known = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                known.samples += one.samples
        yield from families.values()


def render_together(all_metrics: Iterable[Metrics], *more: Collector) -> tuple[bytes, str]:
    """Return the metrics of several models, which a label names, as text, and its content type. more: what is said
    beside.
    """
    registry = CollectorRegistry()
    registry.register(_Together([*(one.registry for one in all_metrics), *more]))
    return _rendered(registry)
