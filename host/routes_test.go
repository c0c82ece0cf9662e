package host_test

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/internal/config"
)

// onDouble lets hosts find the double of a GPU until the test ends.
func onDouble(t *testing.T) *gdstest.Double {
	t.Helper()
	double := gdstest.Build(t)
	cuda, cufile := gds.Libcuda, gds.Libcufile
	t.Cleanup(func() { gds.Libcuda, gds.Libcufile = cuda, cufile })
	gds.Libcuda, gds.Libcufile = []string{double.Path}, []string{double.Path}
	return double
}

// TestRoutesAreChosenAndLogged starts hosts on the double of a GPU, each with something missing, and reads the line
// that logs the route. None of it keeps a host from starting.
func TestRoutesAreChosenAndLogged(t *testing.T) {
	double := onDouble(t)
	for name, c := range map[string]struct {
		change      func(*config.Config)
		rules       string
		noCuFile    bool
		route, why  string
		neverCalled string
	}{
		"direct": {change: func(c *config.Config) { c.Roots[0].Route = config.RouteDirect }, route: "direct", why: gds.ByCompatibility},
		"staged": {change: func(c *config.Config) { c.Roots[0].Route = config.RouteStaged }, route: "staged", why: "as configured", neverCalled: "cuFileDriverOpen"},
		"among peers": {change: func(c *config.Config) {
			c.Peers.Listen, c.Peers.Hosts, c.Roots[0].Route = "127.0.0.1:0", "127.0.0.1:1", config.RouteDirect
		}, route: "direct", why: gds.ByCompatibility},
		"forbidden":  {change: func(c *config.Config) { c.GDS.MaxDeviceMemory = 0 }, route: "staged", why: "as configured", neverCalled: "cuFileDriverOpen"},
		"no library": {noCuFile: true, route: "staged", why: "no cuFile library"},
		"no driver":  {rules: "cuFileDriverOpen:code=5001", route: "staged", why: "CU_FILE_DRIVER_NOT_INITIALIZED"},
		"no file":    {rules: "cuFileHandleRegister:code=5027", route: "staged", why: "5027"},
		"no kernel":  {rules: "cuModuleLoadData:nth=1:code=222", route: "staged", why: "checksum kernel"},
	} {
		t.Run(name, func(t *testing.T) {
			gds.Libcufile = []string{double.Path}
			if c.noCuFile {
				gds.Libcufile = []string{filepath.Join(t.TempDir(), "none")}
			}
			cfg := configuration(t)
			if c.change != nil {
				c.change(cfg)
			}
			var log bytes.Buffer
			double.Rules(c.rules)
			defer double.Forget()
			h, err := host.New(context.Background(), host.Config{Config: cfg, Log: slog.New(slog.NewTextHandler(&log, nil))})
			testenv.OK(t, err)
			<-h.Routed()
			calls := double.Calls(c.neverCalled)
			if kept := double.Calls("cuFileBufRegister") - double.Calls("cuFileBufDeregister"); (kept > 0) != (c.route == "direct") {
				t.Errorf("%d slots of device memory are kept", kept)
			}
			double.Rules("")
			testenv.NoError(t, h.Close())
			said := ""
			for line := range strings.Lines(log.String()) {
				if strings.Contains(line, "route chosen") {
					said += line
				}
			}
			if strings.Count(said, "\n") != 1 || !strings.Contains(said, "route="+c.route) || !strings.Contains(said, c.why) {
				t.Errorf("%s\nall: %s", said, log.String())
			}
			if c.neverCalled != "" && calls > 0 {
				t.Errorf("%s was called", c.neverCalled)
			}
			if left := probeFiles(t, cfg); len(left) > 0 {
				t.Errorf("files of a probe are left: %v", left)
			}
		})
	}
}

func probeFiles(t *testing.T, cfg *config.Config) []string {
	t.Helper()
	left, err := filepath.Glob(filepath.Join(cfg.Roots[0].Path, ".kvhost", ".probe.*"))
	testenv.OK(t, err)
	return left
}

// The next start removes the probe files of a host that was killed. On a shared root those of another host stay,
// because it may be probing.
func TestProbeFilesOfADeadHostAreRemoved(t *testing.T) {
	double := onDouble(t)
	for _, shared := range []bool{false, true} {
		cfg := configuration(t)
		cfg.Store.HostID, cfg.Roots[0].Shared, cfg.Roots[0].Route = "me", shared, config.RouteDirect
		meta := filepath.Join(cfg.Roots[0].Path, ".kvhost")
		testenv.OK(t, os.MkdirAll(meta, 0o700))
		for _, name := range []string{".probe.me.1f.tmp", ".probe.other.1f.tmp"} {
			testenv.OK(t, os.WriteFile(filepath.Join(meta, name), make([]byte, 1<<20), 0o600))
		}
		h, err := host.New(context.Background(), host.Config{Config: cfg})
		testenv.OK(t, err)
		<-h.Routed()
		testenv.NoError(t, h.Close())
		double.Forget()
		want := []string{filepath.Join(meta, ".probe.other.1f.tmp")}
		if left := probeFiles(t, cfg); shared != slices.Equal(left, want) || !shared && len(left) > 0 {
			t.Errorf("shared %v: left %v", shared, left)
		}
	}
}

// TestCloseDuringHungCuFile: a cuFile call that never returns is the storage's failure. The host logs what it must
// leave behind and closes without an error, so that a SIGTERM ends in exit code 0.
func TestCloseDuringHungCuFile(t *testing.T) {
	double := onDouble(t)
	cfg := configuration(t)
	cfg.Roots[0].Route = config.RouteDirect
	cfg.Store.IOTimeout = 2 * time.Second // nothing else takes so long on a busy machine
	var log bytes.Buffer
	double.Rules("cuFileWrite:hang")
	defer double.Forget()
	defer double.Rules("")
	h, err := host.New(context.Background(), host.Config{Config: cfg, Log: slog.New(slog.NewTextHandler(&log, nil))})
	testenv.OK(t, err)
	<-h.Routed()
	if err := h.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if !strings.Contains(log.String(), "route=staged") || !strings.Contains(log.String(), gds.ErrHung.Error()) {
		t.Errorf("the route that hangs: %s", log.String())
	}
	if !strings.Contains(log.String(), "level=WARN msg=\"GPU left open") {
		t.Errorf("log: %s", log.String())
	}
}

// TestServesBeforeItsRoutes: a host serves while the probe of a route hangs, and pieces are staged.
func TestServesBeforeItsRoutes(t *testing.T) {
	double := onDouble(t)
	cfg := configuration(t)
	cfg.Roots[0].Route = config.RouteDirect
	cfg.Store.IOTimeout = time.Minute // far longer than a start
	double.Rules("cuFileWrite:hang")
	defer double.Forget()
	h, err := host.New(context.Background(), host.Config{Config: cfg})
	testenv.OK(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	<-h.Ready()
	select {
	case <-h.Routed():
		t.Error("the routes are chosen while their probe hangs, want them to be open")
	default:
	}
	double.Rules("")
	cancel()
	testenv.NoError(t, <-ended)
}
