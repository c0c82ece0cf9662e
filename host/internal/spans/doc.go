// Package spans creates OpenTelemetry spans of requests with OpenTelemetry's SDK, and sends them to a collector by OTLP
// (protobuf over HTTP). A request never waits for the collector. A request that is not sampled allocates nothing. If the
// exporter's queue has no room for a span, the span is dropped and counted.
package spans
