"""Facts that the routes of each model show of the others: states, times, figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from ktransformers.server.multi_model.pool import ModelPool, ModelState
from ktransformers.server.multi_model.served import ServedModel
from ktransformers.server.service import ModelGroup, Service
from ktransformers.server.telemetry.metrics import render_together

__all__ = ["PoolGroup"]


class PoolGroup(ModelGroup):
    """The models of a pool, as the routes of each see the others. wall: seconds since 1970."""

    def __init__(self, models: Sequence[ServedModel], pool: ModelPool, wall: Callable[[], float] = time.time):
        self.services = [model.service for model in models]
        self._pool, self._wall = pool, wall
        for service in self.services:
            service.group = self

    @override
    def state_of(self, service: Service) -> str:
        return self._pool.state(_name(service))

    @override
    def expires_at(self, service: Service) -> float | None:
        end = self._pool.idle_end(_name(service))
        return None if end is None else self._wall() + end - self._pool.now()

    @override
    def described(self) -> list[dict[str, Any]]:
        return [self._described(service) for service in self.services]

    def _described(self, service: Service) -> dict[str, Any]:
        name = _name(service)
        return {
            "name": name,
            "state": self._pool.state(name),
            "waiting": self._pool.num_waiting(name),
            "running": service.admission.num_active,
            "bytes": dict(self._pool.nbytes(name)),
            "expires_at": self.expires_at(service) if service.backend.is_ready else None,
        }

    @override
    def metrics(self, more: Collector) -> tuple[bytes, str]:
        return render_together(
            (service.metrics for service in self.services), _PoolCollector(self._pool, self.services), more
        )


def _name(service: Service) -> str:
    return service.config.model_names[0]


class _PoolCollector(Collector):
    def __init__(self, pool: ModelPool, services: Sequence[Service]):
        self._pool, self._names = pool, [_name(service) for service in services]

    def collect(self) -> Iterator[Metric]:
        pool, label = self._pool, ["model_name"]
        running = GaugeMetricFamily("ktransformers:model_running", "1 for a model that is loaded.", labels=label)
        waiting = GaugeMetricFamily(
            "ktransformers:model_requests_waiting", "Requests that wait for a model to be loaded.", labels=label
        )
        planned = GaugeMetricFamily(
            "ktransformers:model_bytes",
            "Memory that a model takes while it runs, as planned.",
            labels=[*label, "device"],
        )
        loads = CounterMetricFamily("ktransformers:model_loads", "Times that a model was loaded.", labels=label)
        stops = CounterMetricFamily("ktransformers:model_stops", "Times that a model was stopped.", labels=label)
        failures = CounterMetricFamily(
            "ktransformers:model_failures", "Loads that failed, and models that ended by themselves.", labels=label
        )
        for name in self._names:
            totals = pool.totals[name]
            running.add_metric([name], pool.state(name) is ModelState.RUNNING)
            waiting.add_metric([name], pool.num_waiting(name))
            for device, nbytes in pool.nbytes(name).items():
                planned.add_metric([name, device], nbytes)
            loads.add_metric([name], totals.num_loads)
            stops.add_metric([name], totals.num_stops)
            failures.add_metric([name], totals.num_failures)
        memory = GaugeMetricFamily("ktransformers:models_memory_bytes", "For all models together.", labels=["device"])
        for device, nbytes in pool.memory.items():
            memory.add_metric([device], nbytes)
        yield from (running, waiting, planned, loads, stops, failures, memory)
