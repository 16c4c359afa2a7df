"""OpenTelemetry set up from its standard environment variables; off unless they name an exporter.

`OTEL_EXPORTER_OTLP_ENDPOINT` (or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) switches tracing on; the others have their usual
meaning: `OTEL_EXPORTER_OTLP_PROTOCOL`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER` and its `_ARG`,
`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_*`, and `OTEL_TRACES_EXPORTER=none` or
`OTEL_SDK_DISABLED=true` to switch it off again. Where it is off, the SDK is not even imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext, Tracer

VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_RESOURCE_ATTRIBUTES",
)
"""Those that gateway and worker pods take from the ConfigMap `CONFIG_MAP` of their namespace, where there is one."""
CONFIG_MAP = "taktline-tracing"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Tracing:
    """A process's tracer and the exporter behind it."""

    def __init__(self, provider: TracerProvider, name: str) -> None:
        self._provider = provider
        self.tracer: Tracer = provider.get_tracer(name)

    def close(self) -> None:
        """Exports what is left (bounded by the exporter's own timeout) and stops the exporter's thread."""
        self._provider.shutdown()


def tracing_from_environment(
    service: str, version: str, environment: Mapping[str, str] | None = None
) -> Tracing | None:
    """Tracing as the environment asks for it; None where it asks for none.

    Args:
        service: `service.name` where `OTEL_SERVICE_NAME` says nothing.

    Raises:
        TaktlineError: CONFIG_INVALID for an exporter or protocol that does not exist.
    """
    env = os.environ if environment is None else environment
    exporter = env.get("OTEL_TRACES_EXPORTER", "").strip()
    wanted = any(env.get(name, "").strip() for name in _ENDPOINTS) or exporter not in ("", "none")
    if not wanted or exporter == "none" or env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = {"service.name": env.get("OTEL_SERVICE_NAME", "") or service, "service.version": version}
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(exporter, env)))
    return Tracing(provider, service)


def parent_context(parent: TraceContext | None) -> Context:
    """The context that makes a span a child of `parent`, of another process; without one, the start of a trace."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    if parent is None:
        return Context()
    return trace.set_span_in_context(trace.NonRecordingSpan(_span_context(parent)), Context())


def context_of(span: Any) -> TraceContext:
    """What other processes must know of a span of this one."""
    context: SpanContext = span.get_span_context()
    return TraceContext(context.trace_id, context.span_id, context.trace_flags.sampled)


def _span_context(context: TraceContext) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=flags)


def _exporter(name: str, env: Mapping[str, str]) -> SpanExporter:
    if name not in ("", "otlp"):
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"OTEL_TRACES_EXPORTER is {name!r}, which is not built in",
            "set it to otlp (a collector translates for other systems) or none",
        )
    protocol = next((env[key].strip() for key in _PROTOCOLS if env.get(key, "").strip()), "http/protobuf")
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    raise TaktlineError(
        ErrorCode.CONFIG_INVALID,
        f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}",
        "set it to http/protobuf (port 4318 of a collector) or grpc (port 4317)",
    )
