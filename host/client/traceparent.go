package client

import "context"

type traceparentKey struct{}

// WithTraceparent names the span that asks, as a W3C traceparent: spans that the host makes of what a session does with this
// context become its children. With OpenTelemetry's SDK it is what propagation.TraceContext injects.
func WithTraceparent(ctx context.Context, traceparent string) context.Context {
	return context.WithValue(ctx, traceparentKey{}, traceparent)
}

func traceparentOf(ctx context.Context) string {
	text, _ := ctx.Value(traceparentKey{}).(string)
	return text
}
