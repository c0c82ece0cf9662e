package client_test

import (
	"errors"
	"net"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
	"google.golang.org/grpc"
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

// unitless is a host that knows no units.
type unitless struct {
	proto.UnimplementedEngineServiceServer
}

func (unitless) Session(s grpc.BidiStreamingServer[proto.SessionRequest, proto.SessionResponse]) error {
	m, err := s.Recv()
	if err != nil {
		return err
	}
	hello := &proto.HelloReply{Protocol: proto.Protocol, Nonce: make([]byte, proto.NonceBytes), KeyBytes: 32}
	if err := s.Send(&proto.SessionResponse{Id: m.Id, Body: &proto.SessionResponse_Hello{Hello: hello}}); err != nil {
		return err
	}
	_, _ = s.Recv() // the client's end
	return nil
}

// A host that knows no units would take a rank's pages for something else. A session with units ends there, others do not.
func TestHostWithoutUnits(t *testing.T) {
	socket := filepath.Join(testenv.Dir(t), "s")
	l, err := net.Listen("unix", socket)
	testenv.OK(t, err)
	old := grpc.NewServer()
	proto.RegisterEngineServiceServer(old, unitless{})
	go old.Serve(l)
	defer old.Stop()
	for _, units := range []int{0, 2} {
		s, err := client.Dial(t.Context(), client.Hello{Socket: socket, Engine: "e", Namespace: kv.Namespace{
			Model: "m", DType: "f", KeyBytes: 32, TokensPerBlock: 1, Units: units, Groups: []kv.Group{{Geometry: kv.Uniform(1, 1, 1, 4096)}}}})
		if units == 0 {
			testenv.OK(t, err)
			s.Close()
		} else if !errors.Is(err, client.ErrVersion) {
			t.Errorf("a session with units: got %v, want %v", err, client.ErrVersion)
		}
	}
}

var wireType = regexp.MustCompile(`\b(proto|abi)\.`)

// The client's API has no type of the protocol or of the policy ABI, and an importer builds neither the ABI nor a WebAssembly runtime.
func TestFace(t *testing.T) {
	doc, err := exec.Command("go", "doc", "-all", ".").Output()
	if err != nil {
		t.Fatalf("go doc: %v\n%s", err, said(err))
	}
	for line := range strings.Lines(string(doc)) {
		if wireType.MatchString(line) {
			t.Errorf("the API has a type of the wire or of the ABI: %s", strings.TrimSpace(line))
		}
	}
	deps, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, said(err))
	}
	for path := range strings.FieldsSeq(string(deps)) {
		if strings.HasSuffix(path, "kvhost/abi") || strings.Contains(path, "wazero") {
			t.Errorf("the client needs %s", path)
		}
	}
}

// said is what a command that failed wrote to its standard error.
func said(err error) []byte {
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		return failed.Stderr
	}
	return nil
}
