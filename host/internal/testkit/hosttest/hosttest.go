// Package hosttest runs a host in the process of a test.
package hosttest

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// Configuration is the default one with these roots, a socket of its own, no HTTP listener, and the policies that other
// tests have compiled.
func Configuration(t testing.TB, roots ...config.Root) *config.Config {
	t.Helper()
	dir, err := os.MkdirTemp(testenv.ShortTemp(), "kvhost") // t.TempDir can be too long for a socket
	testenv.OK(t, err)
	t.Cleanup(func() {
		testenv.NoError(t, os.RemoveAll(dir))
	})
	c := config.Default()
	c.Socket, c.HTTP.Listen, c.Roots = filepath.Join(dir, "s"), "", roots
	if c.PolicyCache, err = policytest.CacheDir(); err != nil { // this machine has no Go, and the modules are embedded
		c.PolicyCache = filepath.Join(dir, "policies")
	}
	return c
}

// Start runs a host of a configuration until the test ends; stop ends it earlier.
func Start(t testing.TB, c *config.Config) (h *host.Host, stop func()) {
	t.Helper()
	return StartWith(t, host.Config{Config: c, Version: "test"})
}

// StartWith is Start with all that a host is told.
func StartWith(t testing.TB, c host.Config) (h *host.Host, stop func()) {
	t.Helper()
	if c.Log == nil {
		c.Log = newLog(t)
	}
	h, err := host.New(context.Background(), c)
	testenv.OK(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	select {
	case <-h.Ready():
		<-h.Routed()
	case err := <-ended:
		t.Fatalf("the host ended: %v", err)
	}
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("host: %v", err)
		}
	})
	t.Cleanup(stop)
	return h, stop
}
