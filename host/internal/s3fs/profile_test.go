package s3fs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Requests go on while a profile's file is renewed: those that follow a renewal are signed by the new key, but for one that shares a reading
// that was under way, none after it by the withdrawn one, and none by nobody while the file is half written or away.
func TestProfileIsRenewed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "credentials")
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY", "AWS_SECRET_KEY", "AWS_PROFILE"} {
		t.Setenv(name, "")
	}
	t.Setenv("AWS_CONFIG_FILE", filepath.Join(t.TempDir(), "none"))
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", file)
	server := startAskers(t)
	pair := func(key string) string {
		return "[default]\naws_access_key_id = " + key + "\naws_secret_access_key = secret\n"
	}
	must(t, os.WriteFile(file, []byte(pair("first")), 0o600))
	f, err := Open(Config{Path: top, Endpoint: server.URL, PathStyle: true})
	must(t, err)
	signed := func(step string) string {
		_, _ = f.Stat(top + "/" + step) // there is no such object
		return server.of(step)
	}
	end := load(f)
	before := "<first>"
	for _, c := range []struct{ step, holds, by string }{
		{"a", pair("first"), "<first>"}, {"b", pair("second"), "<second>"}, {"c", "[default]\naws_access_key_id = thi", "<second>"},
		{"d", "", "<second>"}, {"e", pair("third"), "<third>"}, {"f", "no file", "<third>"}, {"g", pair("first"), "<first>"},
	} {
		if c.holds == "no file" {
			must(t, os.Remove(file))
		} else {
			must(t, os.WriteFile(file+".next", []byte(c.holds), 0o600))
			must(t, os.Rename(file+".next", file))
		}
		got := signed(c.step)
		for n := 0; got == before && got != c.by; n++ { // it shares a reading of before
			if n == 4 {
				t.Errorf("%s: signed by %s again and again, want %s", c.step, got, c.by)
				break
			}
			got = signed(fmt.Sprint(c.step, n))
		}
		if next := signed(c.step + " next"); got != c.by || next != c.by {
			t.Errorf("%s: signed by %s, and then by %s, want %s", c.step, got, next, c.by)
		}
		before = c.by
	}
	end()
	if got := signed("load"); strings.Contains(got, "<>") {
		t.Errorf("keys of the load: %s, want no request without one", got)
	}
	must(t, f.Close())
}
