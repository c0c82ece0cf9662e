package doctor

import (
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
)

// TestBucketsAreTried: a check tries each right, names the ones that lack, and leaves nothing behind.
func TestBucketsAreTried(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	s := s3double.Start(t)
	p := s3double.StartProxy(t, s.URL)
	c := config.Default()
	c.GDS.CUDA = config.CUDAOff
	c.Roots = []config.Root{{Path: "s3://bucket/a", Capacity: 1 << 30, Endpoint: p.URL, PathStyle: true}}
	for name, k := range map[string]struct {
		rules         []s3double.Rule
		unconditional bool
		shared        bool
		finds         []string
	}{
		"all is right":           {},
		"no conditional writes":  {unconditional: true, finds: []string{"no conditional writes"}},
		"nothing to share it by": {unconditional: true, shared: true, finds: []string{"the bucket cannot be shared"}},
		"rights":                 {rules: []s3double.Rule{{Fault: s3double.Denied, Method: "DELETE"}}, finds: []string{"cannot remove an object", "cannot end a multipart upload"}},
		"no lists":               {rules: []s3double.Rule{{Fault: s3double.Denied, In: "list-type"}}, finds: []string{"cannot list objects"}},
		"no uploads":             {rules: []s3double.Rule{{Fault: s3double.Denied, Method: "POST"}}, finds: []string{"cannot begin a multipart upload"}},
	} {
		s.Unconditional, c.Roots[0].Shared = k.unconditional, k.shared
		p.Set(k.rules...)
		facts, err := Probe(t.Context(), c)
		testenv.OK(t, err)
		var text strings.Builder
		r := Judge("test", c, 0, facts)
		testenv.OK(t, r.Write(&text))
		for _, want := range k.finds {
			if !strings.Contains(text.String(), want) {
				t.Errorf("%s: the report does not say %q:\n%s", name, want, text.String())
			}
		}
		if about := "root s3://bucket/a"; len(k.finds) == 0 && strings.Contains(text.String(), about+":") || !strings.Contains(text.String(), "first byte after") {
			t.Errorf("%s: the report finds something, or tells no speed:\n%s", name, text.String())
		}
		if left := len(s.Objects()); left > 0 && len(k.rules) == 0 {
			t.Errorf("%s: %d objects are left", name, left)
		}
		p.Set()
		for key := range s.Objects() {
			s.Set(key, nil)
		}
	}
}
