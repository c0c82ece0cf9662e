package plugintest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/policytest"
)

// Every first-party policy conforms.
func TestFirstParty(t *testing.T) {
	dir := policytest.Dir(t)
	files, err := filepath.Glob(filepath.Join(dir, "*.wasm"))
	if err != nil || len(files) < 5 {
		t.Fatalf("%d policies in %s, %v", len(files), dir, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".wasm"), func(t *testing.T) {
			t.Parallel()
			r, err := Check(t.Context(), file, Options{Cache: policytest.Cache(t), Slots: 1 << 17})
			testenv.OK(t, err)
			for i := range r.Findings {
				t.Error(&r.Findings[i])
			}
			if len(r.Roles) == 0 || r.Memory == 0 || len(r.Calls) < 2 {
				t.Errorf("the report lacks roles, memory or calls: %+v", r)
			}
			for _, u := range r.Calls {
				t.Logf("%-12s %5.1f %% of its fuel in the dearest call: %d of %d, %d records", u.Export, 100*u.Share(), u.Used, u.Allowed, u.Records)
			}
		})
	}
}

func TestWhatCannotBeRead(t *testing.T) {
	if _, err := Check(t.Context(), filepath.Join(t.TempDir(), "none.wasm"), Options{}); err == nil {
		t.Error("a file that is not there was checked")
	}
	path := filepath.Join(t.TempDir(), "text.wasm")
	testenv.OK(t, os.WriteFile(path, []byte("not a module"), 0o644))
	r, err := Check(t.Context(), path, Options{})
	if err != nil || len(r.Findings) != 1 || !strings.Contains(r.Findings[0].Error(), "refuses it") {
		t.Errorf("checking a text file: got %+v, %v, want one finding", r, err)
	}
}
