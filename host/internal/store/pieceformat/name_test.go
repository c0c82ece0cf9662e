package pieceformat

import (
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/staging"
)

func keyOf(r *rand.Rand, bytes int) (k kv.Key) {
	for i := range bytes {
		k[i] = byte(r.Uint32())
	}
	return k
}

// TestBuiltin: the built-in name is what fanout without settings answers.
func TestBuiltin(t *testing.T) {
	const text = "model=a\n"
	p, err := fanout.New(guest.Info{MaxNamespaces: 1})
	must(t, err)
	p.Namespace(0, text)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 200 {
		q := abi.PlaceQuery{KeyLen: []uint32{16, 32, 20}[i%3], Group: r.Uint32N(20), Rank: r.Uint32N(64)}
		k := keyOf(r, int(q.KeyLen))
		q.Key = k
		want, _ := p.Place(&q, nil, nil)
		got := AppendBuiltin([]byte("x"), kv.TextDigest([]byte(text)), q.KeyLen, &k, q.Group, q.Rank)
		if string(got) != "x"+string(want) {
			t.Fatalf("got the built-in name %s, want %s", got, want)
		}
		if !IsBuiltin(want) {
			t.Errorf("%s is not read as a built-in name", want)
		}
	}
}

func TestIsBuiltin(t *testing.T) {
	ns := strings.Repeat("0123456789abcdef", 2)
	for path, want := range map[string]bool{
		ns + "/ab/c/abcdef0123456789_g0_r0.kv":  true,
		ns + "/ab/d/abcdef0123456789_g0_r0.kv":  false,
		ns + "/ab/c/ABCDEF0123456789_g0_r0.kv":  false,
		ns + "/ab/c/abcdef0123456789_g00_r0.kv": false,
		ns + "/ab/c/abcdef0123456789_g0_r0.kvx": false,
		ns + "/ab/c/abcdef0123456789_g0.kv":     false,
		ns + "/ab/c/_g0_r0.kv":                  false,
		ns + "/ab/c/":                           false,
		"":                                      false,
		"a":                                     false,
	} {
		if got := IsBuiltin([]byte(path)); got != want {
			t.Errorf("got %t for %q, want %t", got, path, want)
		}
	}
}

func TestReserved(t *testing.T) {
	ns := strings.Repeat("0123456789abcdef", 2)
	for path, want := range map[string]bool{
		ns:                                       true,
		ns + "/ab":                               true,
		ns + "/ab/c":                             true,
		ns + "/ab/c/abcdef0123456789_g0_r0.kv":   true,
		ns + "/ab/c/abcdef0123456789_g0_r0.kv/x": true,
		ns + "/ab/c/abcdef0123456789_g0_r0":      false,
		ns + "/abc/abcdef0123456789_g0_r0.kv":    false,
		ns + "/abcd":                             false,
		ns[1:] + "/ab":                           false,
		"model/ab/c":                             false,
		"a":                                      false,
	} {
		if got := Reserved([]byte(path)); got != want {
			t.Errorf("got %t for %q, want %t", got, path, want)
		}
	}
}

func TestNames(t *testing.T) {
	want := []Name{{3, "a/b"}, {0, "c"}, {3, "d"}}
	b := AppendNames(nil, want)
	if got, err := DecodeNames(b); err != nil || !slices.Equal(got, want) || len(b) != NamesBytes(want) {
		t.Errorf("got %v, %v from %d bytes, want %v from %d", got, err, len(b), want, NamesBytes(want))
	}
	for _, bad := range [][]Name{{{64, "a"}}, {{0, "../a"}}, {{0, "/a"}}, {{0, ""}}, {{0, ".kvhost/lock"}}, {{0, "a b"}}} {
		if got, err := DecodeNames(AppendNames(nil, bad)); err == nil {
			t.Errorf("a list with %v is read as %v", bad, got)
		}
	}
	for n := 1; n < len(b); n++ {
		if n != 6 && n != 10 { // where a name ends
			if got, err := DecodeNames(b[:n]); err == nil {
				t.Errorf("%d of %d bytes are read as %v", n, len(b), got)
			}
		}
	}
}

func FuzzDecodeList(f *testing.F) {
	f.Add(AppendNames(nil, []Name{{3, "a/b"}, {0, "c"}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := DecodeNames(b)
		if err == nil && string(AppendNames(nil, list)) != string(b) {
			t.Errorf("%x is read as %v, which is written in another way", b, list)
		}
	})
}

func FuzzParseTemp(f *testing.F) {
	f.Add(".a.kv.host1.1f.tmp")
	f.Add("..tmp")
	f.Fuzz(func(t *testing.T, base string) {
		if temp, ok := ParseTemp(base); ok && !ValidHostID(temp.Host) {
			t.Fatalf("%q is of %q", base, temp.Host)
		}
	})
}

func TestTempNames(t *testing.T) {
	long := make([]byte, maxName)
	for i := range long {
		long[i] = 'a'
	}
	for _, base := range []string{"x", "a.b.c", string(long)} {
		name := TempName("/root/dir/"+base, "host1", 1<<63)
		temp := name[len("/root/dir/"):]
		if got, ok := ParseTemp(temp); !ok || got != (Temp{"host1", 1 << 63}) || len(temp) > maxName {
			t.Errorf("%q is parsed as %+v, %t, want the host and the number that it was made of", temp, got, ok)
		}
	}
	for _, base := range []string{
		"x.tmp", ".x.tmp", ".x.host1.tmp", ".x.HOST.1f.tmp", ".x.host1.zz.tmp", ".x.host1.1f", ".host1.1f.tmp",
	} {
		if temp, ok := ParseTemp(base); ok {
			t.Errorf("%q is read as %+v", base, temp)
		}
	}
}

// TestWrittenCount: counts are read back, and nothing else is.
func TestWrittenCount(t *testing.T) {
	for _, want := range [][2]int64{{0, 0}, {20000, 0}, {20000, 1 << 40}} {
		if day, bytes, err := DecodeWritten(EncodeWritten(want[0], want[1])); err != nil || day != want[0] || bytes != want[1] {
			t.Errorf("got %d and %d, error %v, want %d", day, bytes, err, want)
		}
	}
	for _, text := range []string{"", "1", "1 -1\n", "-1 1\n", "1 1", "1 1\n\n", "01 1\n", "1 1x\n"} {
		if _, _, err := DecodeWritten([]byte(text)); !errors.Is(err, ErrDamaged) {
			t.Errorf("%q: error %v, want %v", text, err, ErrDamaged)
		}
	}
}

// TestReadFileCloses: whether it can be read or not.
func TestReadFileCloses(t *testing.T) {
	name := t.TempDir() + "/file"
	must(t, os.WriteFile(name, make([]byte, 10), 0o600))
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(list)
	}
	before := open()
	for range 10 {
		b, info, err := ReadFile(staging.OS(), name, 10)
		if err != nil || len(b) != 10 || info.Size != 10 {
			t.Fatalf("got %d bytes of %d, error %v, want all 10", len(b), info.Size, err)
		}
		if _, _, err := ReadFile(staging.OS(), name, 9); !errors.Is(err, ErrDamaged) {
			t.Fatalf("a file that is too long: error %v, want %v", err, ErrDamaged)
		}
	}
	if after := open(); after > before {
		t.Errorf("%d files are open, want the %d of before", after, before)
	}
}
