package s3fs

import (
	"bytes"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
)

// What a proxy changes is found as the lock is taken: a host that would lock itself out later does without conditions, and one that
// could not read a part of an object does not begin.
func TestServersBehindProxies(t *testing.T) {
	for quirk, c := range map[string]struct {
		conditional bool
		fails       string
	}{"": {true, ""}, s3double.WeakETags: {true, ""}, s3double.NoMatch: {false, ""}, s3double.WholeBodies: {true, "range"}} {
		s := s3double.Start(t)
		s.Quirk = quirk
		f := open(t, s.URL)
		lock, err := f.Lock(top + "/lock")
		if err != nil || c.fails != "" {
			if c.fails == "" || err == nil || !strings.Contains(err.Error(), c.fails) {
				t.Errorf("%s: the lock: got %v, want an error that says %q", quirk, err, c.fails)
			}
			continue
		}
		if f.conditional() != c.conditional {
			t.Errorf("%s: conditional writes: got %v, want %v", quirk, f.conditional(), c.conditional)
		}
		l, last := lock.(*lease), time.Time{}
		for range 4 { // each by a condition that holds
			testenv.Until(t, quirk+": a renewal", func() bool {
				l.mu.Lock()
				defer l.mu.Unlock()
				if l.over {
					t.Fatalf("%s: the host has locked itself out", quirk)
				}
				renewed := l.renewed.After(last)
				last = l.renewed
				return renewed
			})
		}
		w, err := f.OpenFile(top+"/a.tmp", os.O_RDWR|os.O_CREATE, 0o600)
		must(t, err)
		want := bytes.Repeat([]byte("page"), 1024)
		_, err = w.WriteAt(want, 0)
		must(t, err)
		must(t, w.Close())
		testenv.Until(t, quirk+": a publication", func() bool { // on a busy machine the lock lapses now and then
			return f.RenameNoReplace(top+"/a.tmp", top+"/a") == nil
		})
		r, err := f.OpenFile(top+"/a", os.O_RDONLY, fs.FileMode(0))
		must(t, err)
		got := make([]byte, 1024)
		if _, err := r.ReadAt(got, 2048); err != nil || !bytes.Equal(got, want[2048:3072]) {
			t.Errorf("%s: a read of a part: %v, or other bytes than were written", quirk, err)
		}
		must(t, r.Close())
		must(t, lock.Close())
	}
}
