package gds

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

func openCuFile(t *testing.T, g *GPU, path ...string) *CuFile {
	t.Helper()
	c, err := LoadCuFile(path...)
	testenv.OK(t, err)
	on(t, g, c.Open)
	t.Cleanup(func() {
		if g.Err() == nil {
			on(t, g, c.Close)
		}
	})
	return c
}

// cuFileOf is the double's library, or with KVHOST_TEST_GPU set the real one.
func cuFileOf(t *testing.T, g *GPU) *CuFile {
	t.Helper()
	if os.Getenv("KVHOST_TEST_GPU") != "" {
		return openCuFile(t, g)
	}
	return openCuFile(t, g, g.driver.lib.name)
}

func TestCuFileSays(t *testing.T) {
	g, _ := open(t, Config{Threads: 1})
	c := cuFileOf(t, g)
	v, err := c.Version()
	if err != nil || v < 1000 {
		t.Errorf("version %d, %v", v, err)
	}
	p, err := c.Properties()
	if err != nil || p.MaxDirectIOKB == 0 {
		t.Errorf("properties: got %+v, %v, want a limit of direct I/O", p, err)
	}
	if err := c.SetBool(AllowCompatMode, true); err == nil {
		t.Error("a parameter was taken by an open driver")
	}
	t.Logf("version %d, %+v", v, p)
}

func TestCuFileDriverFails(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	lib := openCuFile(t, g, double.Path)
	double.Rules("cuFileDriverOpen:code=5001")
	if err := lib.Open(nil); err == nil || !strings.Contains(err.Error(), "CU_FILE_DRIVER_NOT_INITIALIZED (5001)") {
		t.Error(err)
	}
	if _, err := LoadCuFile("libkvhost-no-such.so"); !errors.Is(err, ErrNoCuFile) {
		t.Error(err)
	}
}

func TestStatsNameTheRoute(t *testing.T) {
	g, _ := open(t, Config{Threads: 1})
	c := cuFileOf(t, g)
	testenv.OK(t, c.StartStats())
	if r, err := c.Stats(); err != nil {
		t.Errorf("statistics: got %+v, %v", r, err)
	}
	for _, k := range []struct {
		r    Routes
		want string
	}{
		{Routes{}, "nothing"}, {Routes{Reads: 2, PosixReads: 2}, "compatibility"},
		{Routes{Writes: 1, P2PWrites: 1}, "peer"},
		{Routes{Reads: 1, NVFSReads: 1}, "nvidia-fs"}, {Routes{Reads: 2, NVFSReads: 1, PosixReads: 1}, "mixed"},
	} {
		if !strings.Contains(k.r.String(), k.want) {
			t.Errorf("text of %+v: got %s", k.r, k.r)
		}
	}
}
