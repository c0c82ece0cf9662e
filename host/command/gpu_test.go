package command

import (
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// A host whose GPU fails while it runs reports it in a metric at once, and in its exit code at the end.
func TestLostGPUIsSaid(t *testing.T) {
	dir, double := shortDir(t), gdstest.Build(t)
	cmd := command(t, dir, "--http-listen", anyPort, "--gds-use-cufile=false")
	cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+filepath.Dir(double.Path),
		"KVHOST_DOUBLE=cuIpcOpenMemHandle_v2:code=719")
	_, logged, stop := startCommand(t, cmd)
	address := httpAddress(t, logged)
	inService := func() string {
		r, err := http.Get("http://" + address + "/metrics")
		testenv.OK(t, err)
		defer r.Body.Close()
		text, err := io.ReadAll(r.Body)
		testenv.OK(t, err)
		_, value, _ := strings.Cut(string(text), `kvhost_gpu_in_service{gpu="`+gdstest.UUID+`"} `)
		return value[:min(1, len(value))]
	}
	if v := inService(); v != "1" {
		t.Errorf("in service: %q", v)
	}
	s, err := client.Dial(t.Context(), client.Hello{
		Socket: filepath.Join(dir, "kvhost.sock"), Engine: "e", Role: "worker", LocalRanks: 1, DeviceUUID: gdstest.UUID,
		Namespace: kv.Namespace{Model: "m", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16,
			Groups: []kv.Group{{Geometry: kv.Uniform(2, 1, 1, 8192)}}},
	})
	testenv.OK(t, err)
	defer s.Close()
	if _, err := s.RegisterIPC(t.Context(), 0, [][]byte{make([]byte, 64)},
		[]client.PlaneRegion{{Stride: 8192, Blocks: 8}}); err == nil {
		t.Error("memory of a lost GPU was registered")
	}
	if v := inService(); v != "0" {
		t.Errorf("in service: %q", v)
	}
	if err := s.Ping(t.Context()); err != nil { // the host goes on
		t.Error(err)
	}
	if code := stop(syscall.SIGTERM); code != exitGPU || !strings.Contains(logged(), "out of service") {
		t.Errorf("exit code %d\n%s", code, logged())
	}
}
