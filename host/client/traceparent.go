package client

import "context"

type traceparentKey struct{}

// WithTraceparent sets the parent of the host's spans for calls with this context, as a W3C traceparent. With OpenTelemetry's
// SDK, it is the value that propagation.TraceContext injects.
func WithTraceparent(ctx context.Context, traceparent string) context.Context {
	return context.WithValue(ctx, traceparentKey{}, traceparent)
}

func traceparentOf(ctx context.Context) string {
	text, _ := ctx.Value(traceparentKey{}).(string)
	return text
}
