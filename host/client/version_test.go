package client_test

import (
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// A host of another version has other services: it is there, and trying again does not help.
func TestHostOfAnotherVersion(t *testing.T) {
	socket := filepath.Join(testenv.Dir(t), "s")
	l, err := net.Listen("unix", socket)
	testenv.OK(t, err)
	other := grpc.NewServer()
	go other.Serve(l)
	defer other.Stop()
	_, err = client.Dial(t.Context(), client.Hello{Socket: socket, Engine: "e", Role: "r", Namespace: kv.Namespace{
		Model: "m", DType: "f", KeyBytes: 32, TokensPerBlock: 1, Groups: []kv.Group{{Geometry: kv.Uniform(1, 1, 1, 4096)}}}})
	if !errors.Is(err, client.ErrVersion) || errors.Is(err, client.ErrHostGone) || !strings.Contains(err.Error(), "EngineService") {
		t.Errorf("a session with a host of another version: got %v, want %v, with what it lacks", err, client.ErrVersion)
	}
}
