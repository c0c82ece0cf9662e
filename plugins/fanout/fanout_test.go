package fanout

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
)

func newPolicy(t testing.TB, config guest.Config) *Policy {
	t.Helper()
	p, err := New(guest.Info{MaxNamespaces: 4, Config: config})
	testenv.OK(t, err)
	p.Namespace(1, "model=a\n")
	p.Namespace(3, "model=b\n")
	return p
}

func query(key string, group, rank uint32) *abi.PlaceQuery {
	q := &abi.PlaceQuery{Namespace: 1, Group: group, Rank: rank}
	n, _ := hex.Decode(q.Key[:], []byte(key))
	q.KeyLen = uint32(n)
	return q
}

func TestPlace(t *testing.T) {
	sum := sha256.Sum256([]byte("model=a\n"))
	ns := hex.EncodeToString(sum[:16])
	for _, c := range []struct {
		widths, key string
		group, rank uint32
		want        string
	}{
		{"2/1", "abcdef0123456789", 0, 0, ns + "/ab/c/abcdef0123456789_g0_r0.kv"},
		{"2/1", "00ff00ff00ff00ff", 12, 4294967295, ns + "/00/f/00ff00ff00ff00ff_g12_r4294967295.kv"},
		{"3", "abcdef0123456789", 0, 1, ns + "/abc/abcdef0123456789_g0_r1.kv"},
		{"1/2/4/1", "abcdef0123456789", 0, 1, ns + "/a/bc/def0/1/abcdef0123456789_g0_r1.kv"},
	} {
		p := newPolicy(t, guest.Config{ConfigWidths: c.widths})
		q := query(c.key, c.group, c.rank)
		path, root := p.Place(q, nil, []byte("x"))
		if string(path) != "x"+c.want || root != abi.None {
			t.Errorf("got %s on root %d, want %s", path, root, c.want)
		}
	}
}

func TestPlaceNamesNothingUnknown(t *testing.T) {
	p := newPolicy(t, nil)
	for _, q := range []*abi.PlaceQuery{
		{Namespace: 0, KeyLen: 16}, {Namespace: 9, KeyLen: 16}, {Namespace: 1}, {Namespace: 1, KeyLen: 1}, {Namespace: 1, KeyLen: 33},
	} {
		if path, _ := p.Place(q, nil, nil); len(path) != 0 {
			t.Errorf("the path for %+v is %s, want none", q, path)
		}
	}
}

func TestBadWidths(t *testing.T) {
	for _, w := range []string{"", "0", "5", "2/", "2//1", "1/1/1/1/1", "4/4/1", "x", "10"} {
		if _, err := New(guest.Info{Config: guest.Config{ConfigWidths: w}}); err == nil || !strings.Contains(err.Error(), ConfigWidths) {
			t.Errorf("starting with widths %q: got %v", w, err)
		}
	}
}
