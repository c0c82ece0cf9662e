// Package spans makes OpenTelemetry spans of requests and sends them to a collector by OTLP: protobuf over HTTP. A request
// never waits for that. What is not sampled costs no memory, and what the collector does not take in time is dropped and
// counted.
//
// The messages of OTLP that a host sends are few, so they are written field by field ([Span.End]); tests decode them with the
// code that OpenTelemetry generates.
package spans
