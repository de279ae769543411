"""What ``/metrics`` shows. Names of the reference system where the meaning is the same, else ours.

Gauges and the engine's counters come from its last periodic summary, at the moment of a scrape.
"""

from collections.abc import Iterable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.calls import Choice
from server.engine_client import EngineClient

TTFT_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
    *(10, 20, 40, 60, 80, 100, 200, 400),
)
"""Seconds. The reference's, with a low end for small models."""
ITL_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06),
    *(0.08, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_LABELS = ("model_name", "engine_type")


class ServerMetrics:
    """The registry of one server."""

    def __init__(self, engine: EngineClient, model_name: str, engine_type: str = "unified") -> None:
        self.registry = CollectorRegistry()
        self._values = (model_name, engine_type)
        self.registry.register(_EngineCollector(engine, self._values))
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._first_token = self._histogram(
            "sglang:time_to_first_token_seconds",
            "Arrival to first output token.",
            TTFT_BUCKETS,
            "is_streaming",
        )
        self._per_token = self._histogram(
            "sglang:request_time_per_output_token_seconds",
            "Time per output token after the first, by request.",
            ITL_BUCKETS,
        )
        self._end_to_end = self._histogram(
            "sglang:e2e_request_latency_seconds", "Arrival to the last token.", TTFT_BUCKETS
        )
        self._prompt = self._histogram(
            "sglang:prompt_tokens_histogram", "Prompt tokens by request.", TOKEN_BUCKETS
        )
        self._generation = self._histogram(
            "sglang:generation_tokens_histogram", "Output tokens by request.", TOKEN_BUCKETS
        )
        self._requests = self._counter(
            "sglang:num_requests", "Completions that have got their end.", *_LABELS
        )
        self._finished = self._counter(
            "interlock:finished_requests", "Completions by how they ended.", *_LABELS, "reason"
        )
        self._http_requests = self._counter(
            "sglang:http_requests", "HTTP requests received.", "endpoint", "method"
        )
        self._http_responses = self._counter(
            "sglang:http_responses", "HTTP responses.", "endpoint", "status_code", "method"
        )
        self._http_active = prometheus_client.Gauge(
            "sglang:http_requests_active", "HTTP requests being handled.", registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(
            name, text, (*_LABELS, *labels), buckets=tuple(buckets), registry=self.registry
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def ended(self, choice: Choice) -> None:
        """A completion has got its end."""
        end = choice.terminal
        assert end is not None
        assert choice.ended is not None
        values = self._values
        self._requests.labels(*values).inc()
        self._finished.labels(*values, end.finish.type).inc()
        if choice.first_token is None:
            return
        streaming = str(choice.call.streaming).lower()
        self._first_token.labels(*values, streaming).observe(choice.first_token - choice.arrived)
        self._end_to_end.labels(*values).observe(choice.ended - choice.arrived)
        self._prompt.labels(*values).observe(choice.prompt_tokens)
        self._generation.labels(*values).observe(end.tokens)
        if end.tokens > 1:
            span = choice.last_token - choice.first_token
            self._per_token.labels(*values).observe(span / (end.tokens - 1))

    def request_began(self, endpoint: str, method: str) -> None:
        """An HTTP request was received. ``endpoint`` is a route, not a path that clients choose."""
        self._http_requests.labels(endpoint, method).inc()
        self._http_active.inc()

    def request_ended(self, endpoint: str, method: str, status: int) -> None:
        """It was answered, or its client left (status 499)."""
        self._http_responses.labels(endpoint, str(status), method).inc()
        self._http_active.dec()

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return prometheus_client.generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's last summary as metrics."""

    def __init__(self, engine: EngineClient, values: tuple[str, str]) -> None:
        self._engine = engine
        self._values = values

    def collect(self) -> Iterator[Metric]:
        load = self._engine.load
        if load is None:
            return
        share = load.tokens_used / load.tokens_total if load.tokens_total else 0.0
        seen = load.prompt_tokens
        for name, text, value in (
            ("sglang:num_running_reqs", "Requests that hold KV pages.", load.running),
            ("sglang:num_queue_reqs", "Requests that wait for admission.", load.waiting),
            ("sglang:num_used_tokens", "Tokens' worth of KV pages in use.", load.tokens_used),
            ("sglang:max_total_num_tokens", "Tokens that the KV pool holds.", load.tokens_total),
            ("sglang:token_usage", "Used share of the KV pool.", share),
            (
                "sglang:cache_hit_rate",
                "Prompt tokens found in the prefix cache, of all so far.",
                load.cached_tokens / seen if seen else 0.0,
            ),
            ("sglang:num_paused_reqs", "Requests that a pause keeps.", load.held_now),
            ("sglang:gen_throughput", "Output tokens per second.", self._engine.generated.rate),
            ("interlock:at_rest", "1 when the engine holds nothing for anyone.", load.at_rest),
        ):
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._values, float(value))
            yield gauge
        for name, text, count in (
            ("sglang:prompt_tokens", "Prompt tokens.", load.prompt_tokens),
            ("sglang:generation_tokens", "Output tokens.", load.generated_tokens),
            ("sglang:num_aborted_requests", "Requests that were aborted.", load.aborted),
            ("sglang:num_retracted_requests", "Retractions.", load.retracted),
            ("interlock:steps", "Steps of computation.", load.steps),
        ):
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._values, float(count))
            yield counter
        cached = CounterMetricFamily(
            "sglang:cached_tokens",
            "Prompt tokens found in the prefix cache.",
            labels=(*_LABELS, "cache_source"),
        )
        cached.add_metric((*self._values, "device"), float(load.cached_tokens))
        yield cached
