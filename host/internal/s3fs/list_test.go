package s3fs

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
)

// TestListsOfALiar: a list that comes to no end, or has what it cannot have, fails at once.
func TestListsOfALiar(t *testing.T) {
	s := s3double.Start(t)
	p := s3double.StartProxy(t, s.URL)
	f := open(t, p.URL)
	put(t, f, "a", []byte("a"))
	for _, fault := range []s3double.Fault{s3double.SameToken, s3double.Foreign, s3double.Negative} {
		p.Set(s3double.Rule{Fault: fault, In: "list-type"})
		ctx, end := context.WithCancel(t.Context())
		found := 0
		err := f.List(ctx, top, func(string, int64, time.Time) {
			if found++; found == 100 {
				end()
			}
		})
		if !errors.Is(err, ErrAnswer) || found > 2 {
			t.Errorf("%s: got %v after %d names, want %v after at most 2", fault, err, found, ErrAnswer)
		}
		end()
	}
}

// TestPagesThatRepeat are found out whatever their period, and never where none repeats.
func TestPagesThatRepeat(t *testing.T) {
	for period := 1; period < 40; period++ {
		var p pages
		n := 0
		for mark := 0; !p.repeat(string(rune('a'+mark%period)), 1); mark++ {
			n++
		}
		if n > 4*period {
			t.Errorf("marks with a period of %d: found out after %d pages, want at most %d", period, n, 4*period)
		}
	}
	var p pages
	for mark := range 100_000 {
		if p.repeat(string(rune(mark+1)), mark%2) {
			t.Fatalf("page %d of a list without a repetition is taken for one", mark)
		}
	}
	for i := range mostEmpty - 1 {
		if p.repeat("empty"+string(rune(i)), 0) && i < mostEmpty-2 {
			t.Fatalf("page %d of those without an entry is the last, want %d", i, mostEmpty)
		}
	}
}

// TestPrefixesThatAreMisread: what servers make another key of is refused.
func TestPrefixesThatAreMisread(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	for prefix, want := range map[string]bool{
		"": true, "/": true, "x": true, "/x": true, "x/": true, "x/y": true, "x.y/..z/.a": true,
		"/./x": false, "./x": false, "x//y": false, "../x": false, "x/..": false, "x/.": false, "a/b/./c": false, "a\nb": false, "a/\x7f": false,
	} {
		_, err := Open(Config{Path: "s3://bucket/" + prefix})
		var refused *ConfigError
		if errors.As(err, &refused) == want || (err == nil) != want {
			t.Errorf("the prefix %q: got %v, want it taken: %t", prefix, err, want)
		}
	}
}
