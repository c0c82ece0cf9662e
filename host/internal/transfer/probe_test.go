package transfer

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host/kv"
)

// names gives files of a directory names.
func names(dir string) func() string {
	n := 0
	return func() string { n++; return filepath.Join(dir, strconv.Itoa(n)) }
}

// pace is a clock for a probe: from one reading to the next it goes on by cuFile if that was called meanwhile, else by
// staged. So it is no matter how fast the machine is.
func pace(double *gdstest.Double, cuFile, staged time.Duration) func() time.Time {
	now, seen := time.Unix(0, 0), 0
	return func() time.Time {
		if calls := double.Calls("cuFileWrite") + double.Calls("cuFileRead"); calls != seen {
			now, seen = now.Add(cuFile), calls
		} else {
			now = now.Add(staged)
		}
		return now
	}
}

func TestProbe(t *testing.T) {
	for name, c := range map[string]struct {
		took   [2]time.Duration // by cuFile, and staged
		rules  string
		always bool
		bytes  int64
		direct bool
		why    string
	}{
		"works": {always: true, direct: true, bytes: 1 << 20, why: "direct writes "},
		"not registered": {rules: "cuFileHandleRegister:code=5027", always: true, bytes: 1 << 20,
			why: "CU_FILE_HANDLE_NOT_REGISTERED"},
		"reads fail": {rules: "cuFileRead:errno=5", always: true, bytes: 1 << 20, why: "input/output error"},
		"reads lie":  {rules: "cuFileRead:flip=77", always: true, bytes: 1 << 20, why: "bytes come back wrong"},
		"no memory": {rules: "cuMemAlloc_v2:code=2", always: true, bytes: 1 << 20,
			why: "CUDA_ERROR_OUT_OF_MEMORY"},
		"no room": {always: true, bytes: 4096, why: "no room"},
		"slow":    {took: [2]time.Duration{2, 1}, bytes: 64 << 10, why: "staged writes"},
		"fast":    {took: [2]time.Duration{1, 2}, direct: true, bytes: 64 << 10, why: "staged writes"},
		"a draw":  {took: [2]time.Duration{1, 1}, bytes: 64 << 10, why: gds.ByCompatibility},
		"a draw, perhaps by DMA": {rules: "cuFileGetStatsL3:code=5022", took: [2]time.Duration{1, 1}, direct: true,
			bytes: 64 << 10, why: "route unknown"},
		"statistics lack": {rules: "cuFileGetStatsL3:code=5022", always: true, direct: true, bytes: 64 << 10,
			why: "route unknown"},
		"files cannot be":   {always: true, bytes: 1 << 20, why: "no such file"},
		"compat says stats": {always: true, direct: true, bytes: 64 << 10, why: gds.ByCompatibility},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("KVHOST_TEST_GPU", "")
			r := newDeviceRig(t, kv.Uniform(2, 2, 1, 4096), 16, 8<<20)
			dir := t.TempDir()
			if name == "files cannot be" {
				dir = filepath.Join(dir, "none")
			}
			r.double.Rules(c.rules)
			choice := r.engine.Probe(t.Context(), ProbeRequest{
				Direct: r.direct, FS: r.fs, Name: names(dir), Bytes: c.bytes, Always: c.always,
				now: pace(r.double, c.took[0]*time.Second, c.took[1]*time.Second),
			})
			r.double.Rules("")
			if (choice.Direct != nil) != c.direct || !strings.Contains(choice.Why, c.why) {
				t.Errorf("the probe chose %+v, want direct: %v, because %q", choice, c.direct, c.why)
			}
			if left, _ := os.ReadDir(dir); len(left) > 0 {
				t.Errorf("left %v", left)
			}
			if n := r.engine.Stats().SlotsInUse; n != 0 || r.direct.Handles.Stats().Open > 4 {
				t.Errorf("%d slots are held", n)
			}
			if out, _ := r.direct.Slots(); out != 0 {
				t.Errorf("%d slots of the GPU are held", out)
			}
		})
	}
}
