// Package spans makes OpenTelemetry spans of requests, with OpenTelemetry's SDK, and sends them to a collector by OTLP: protobuf
// over HTTP. A request never waits for that. A request that is not sampled allocates nothing, and a span for which the queue of
// the exporter has no room is dropped and counted.
package spans
