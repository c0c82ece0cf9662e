//go:build linux

package testenv

import (
	"net"
	"testing"
)

// OutsideAddress is an address of this machine that is not loopback. Without one the test is skipped.
func OutsideAddress(tb testing.TB) string {
	tb.Helper()
	list, err := net.InterfaceAddrs()
	if err != nil {
		tb.Fatal(err)
	}
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
			return n.IP.String()
		}
	}
	tb.Skip("missing: an address that is not loopback")
	return ""
}
