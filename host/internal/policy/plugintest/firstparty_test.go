package plugintest

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
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
