"""What a rollout service tells of itself: Prometheus metrics, and a page for people."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import jinja2
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from reterm_jax.rollout.groups import Group

if TYPE_CHECKING:
    from reterm_jax.rollout.service import RolloutService

_PAGE = jinja2.Environment(autoescape=True, trim_blocks=True).from_string("""\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>Rollout service</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 0 0 1.5rem } td, th { padding: .2rem .9rem .2rem 0; text-align: left }
td:nth-child(2) { font-variant-numeric: tabular-nums } .bad { color: #a00 }
</style></head><body>
<h1>Rollout service</h1>
{% for title, rows in tables %}
<h2>{{ title }}</h2>
<table>
{% for name, value, bad in rows %}
<tr><td>{{ name }}</td><td{% if bad %} class="bad"{% endif %}>{{ value }}</td></tr>
{% endfor %}
</table>
{% endfor %}
</body></html>
""")


class ServiceMetrics:
    """Counts finished groups, and reads the rest off `service` when it is asked."""

    def __init__(self, service: RolloutService) -> None:
        self._service, self._begun = service, time.monotonic()
        self._registry = CollectorRegistry()
        self._groups = self._counter("groups", "Finished groups.", "kind")
        self._attempts = self._counter("attempts", "Finished attempts.", "kind", "status")
        self._errors = self._counter("turn_errors", "Turns that went wrong.", "category")
        for name, text, value in (
            ("version", "Of the weights that are served; -1 before the first.", lambda: self._version),
            ("attempts_running", "Attempts that hold a sandbox.", lambda: self._running),
            ("sampler_requests_running", "Turns that are being sampled.", lambda: self._of_meter("running")),
            ("sampler_seconds", "Since the sampler was made.", lambda: self._of_meter("seconds")),
            ("sampler_idle_seconds", "In which no turn was sampled.", lambda: self._of_meter("idle_seconds")),
            ("sampled_tokens", "In all.", lambda: self._of_meter("tokens")),
            ("sampled_turns", "In all.", lambda: self._of_meter("turns")),
            ("sampler_failures", "Turns that no sampler could answer.", lambda: self._of_meter("failures")),
            ("samplers_down", "Samplers that do not serve.", lambda: len(self._problems)),
            ("waiting_states", "Failure states that wait for a later step.", lambda: self._waiting),
            ("stored_groups", "Groups that no checkpoint has consumed.", lambda: sum(service.store.counts().values())),
            ("acknowledged_step", "Batches before it were consumed.", lambda: service.store.acknowledged),
        ):
            gauge = Gauge(f"reterm_rollout_{name}", text, registry=self._registry)
            gauge.set_function(value)

    def take(self, group: Group) -> None:
        """Counts a finished group."""
        self._groups.labels(group.kind).inc()
        for attempt in group.attempts:
            status = attempt.outcome.status if attempt.outcome is not None else "env_error"
            self._attempts.labels(group.kind, status).inc()
            for category in filter(None, attempt.errors):
                self._errors.labels(category).inc()

    def prometheus(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)

    def page(self) -> str:
        """HTML that reloads itself."""
        service, schedule = self._service, self._service.parts.schedule
        minutes = (time.monotonic() - self._begun) / 60
        running = service.scheduler.running if service.scheduler else []
        done = {labels: int(value) for labels, value in self._values(self._attempts)}
        tables = [
            (
                "Now",
                [
                    ("version served", "none yet" if self._version < 0 else self._version, self._version < 0),
                    ("batches under way", ", ".join(map(str, running)) or "none", False),
                    ("attempts with a sandbox", self._running, False),
                    ("turns being sampled", int(self._of_meter("running")), False),
                    ("failure states waiting", self._waiting, False),
                    ("tasks known", len(service.parts.tasks), False),
                ],
            ),
            (
                "Batches",
                [
                    (
                        "consumed by a checkpoint",
                        f"steps before {service.store.acknowledged} of {schedule.steps}",
                        False,
                    ),
                    *(
                        (f"step {step}", f"{count} groups" + (", whole" if service.store.finished(step) else ""), False)
                        for step, count in service.store.counts().items()
                    ),
                ],
            ),
            ("Attempts finished", [(f"{kind}, {status}", n, "error" in status) for (kind, status), n in done.items()]),
            ("Turns that went wrong", [(name, int(n), False) for (name,), n in self._values(self._errors)]),
            (
                "Throughput",
                [
                    ("up for", f"{minutes:.1f} min", False),
                    ("attempts a minute", f"{sum(done.values()) / max(minutes, 1e-9):.1f}", False),
                    (
                        "sampled tokens a second",
                        f"{self._of_meter('tokens') / max(self._of_meter('seconds'), 1):.0f}",
                        False,
                    ),
                    (
                        "sampler idle",
                        f"{self._of_meter('idle_seconds') / max(self._of_meter('seconds'), 1e-9):.0%}",
                        False,
                    ),
                ],
            ),
            ("Samplers that do not serve", [(url, problem, True) for url, problem in self._problems.items()]),
        ]
        return _PAGE.render(tables=[(title, rows) for title, rows in tables if rows])

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"reterm_rollout_{name}", text, labels, registry=self._registry)

    def _values(self, counter: Counter) -> list[tuple[tuple[str, ...], float]]:
        samples = (sample for metric in counter.collect() for sample in metric.samples)
        return [(tuple(s.labels.values()), s.value) for s in samples if s.name.endswith("_total")]

    @property
    def _version(self) -> int:
        return -1 if self._service.version is None else self._service.version

    @property
    def _running(self) -> int:
        return self._service.scheduler.gate.inside if self._service.scheduler else 0

    @property
    def _waiting(self) -> int:
        return len(self._service.scheduler.pool) if self._service.scheduler else 0

    @property
    def _problems(self) -> dict[str, str]:
        return self._service.sampler.problems if self._service.sampler else {}

    def _of_meter(self, name: str) -> float:
        return getattr(self._service.meter, name) if self._service.meter else 0.0
