package abi

import (
	"strings"
	"testing"
)

func TestRuns(t *testing.T) {
	for _, c := range []struct{ least, host, says string }{
		{"", "0.1", ""}, {"0.1", "0.1", ""}, {"0.1.0", "0.1", ""}, {"0.1", "0.2", ""}, {"0.9", "0.10", ""}, {"0.9.9", "1", ""}, {Release, Release, ""},
		{"0.1.1", "0.1", "release 0.1.1"}, {"0.10", "0.9", "release 0.10"}, {"2", "1.9.9", "release 2"},
		{"v1", "1", "numbers"}, {"1.2.3.4", "1", "numbers"}, {"1.-2", "1", "numbers"}, {"1.", "1", "numbers"},
	} {
		m := Manifest{Name: "m", MinHost: c.least}
		err := m.Runs(c.host)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q on %q: %v", c.least, c.host, err)
		}
	}
}
