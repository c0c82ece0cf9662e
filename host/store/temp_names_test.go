package store

import "testing"

func FuzzTempOwner(f *testing.F) {
	f.Add(".a.kv.host1.1f.tmp")
	f.Add("..tmp")
	f.Fuzz(func(t *testing.T, base string) {
		if owner, ok := tempOwner(base); ok && !validHostID(owner) {
			t.Fatalf("%q is of %q", base, owner)
		}
	})
}

func TestTempNames(t *testing.T) {
	long := make([]byte, maxName)
	for i := range long {
		long[i] = 'a'
	}
	for _, base := range []string{"x", "a.b.c", string(long)} {
		name := tempName("/root/dir/"+base, "host1", 1<<63)
		temp := name[len("/root/dir/"):]
		if owner, ok := tempOwner(temp); !ok || owner != "host1" || len(temp) > maxName {
			t.Errorf("%q: %q, %t", temp, owner, ok)
		}
	}
	for _, base := range []string{"x.tmp", ".x.tmp", ".x.host1.tmp", ".x.HOST.1f.tmp", ".x.host1.zz.tmp", ".x.host1.1f", ".host1.1f.tmp"} {
		if owner, ok := tempOwner(base); ok {
			t.Errorf("%q is taken for a temporary of %q", base, owner)
		}
	}
}
