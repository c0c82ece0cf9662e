package host_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/kv"
)

// What the operator pins reaches the sessions.
func TestPins(t *testing.T) {
	c := configuration(t)
	c.Session.Pins = map[string]string{"dtype": "bf16"}
	h, _ := hosttest.Start(t, c)
	dial(t, h)
	hello := hosttest.Hello(h.Socket(), kv.Uniform(2, 2, 1, 8192))
	hello.Engine, hello.Namespace.DType = "f", "fp8"
	s, err := client.Dial(t.Context(), hello)
	if err == nil {
		s.Close()
	}
	if !errors.Is(err, client.ErrDisagreement) || !strings.Contains(err.Error(), "dtype") {
		t.Fatalf("HELLO with another dtype than the pinned one: got %v", err)
	}
}
