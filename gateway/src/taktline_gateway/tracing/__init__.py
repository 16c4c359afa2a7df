"""Where a request's time went, request by request: OpenTelemetry spans, and the timeline of the last requests."""
