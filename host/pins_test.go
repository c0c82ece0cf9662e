package host_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/hosttest"
	"github.com/kvhost/kvhost/host/kv"
)

// What the operator pins reaches the sessions.
func TestPins(t *testing.T) {
	c := configuration(t)
	c.Session.Pins = map[string]string{"dtype": "bf16"}
	h, _ := hosttest.Start(t, c)
	dial(t, h)
	s, err := client.Dial(t.Context(), client.Hello{
		Socket: h.Socket(), Engine: "f", Role: "worker", LocalRanks: 1,
		Namespace: kv.Namespace{Model: "m", DType: "fp8", KeyBytes: 32, TokensPerBlock: 16,
			Groups: []kv.Group{{Geometry: kv.Uniform(2, 2, 1, 8192)}}},
	})
	if err == nil {
		s.Close()
	}
	if !errors.Is(err, client.ErrDisagreement) || !strings.Contains(err.Error(), "dtype") {
		t.Fatalf("HELLO with another dtype than the pinned one: got %v", err)
	}
}
