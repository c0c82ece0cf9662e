package janitor

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/plugins/llmd"
	"github.com/kvhost/kvhost/staging"
)

// tree is a directory as vLLM's file-system tier leaves it.
type tree struct {
	testing.TB
	dir, base string
}

const connectorFields = `{"blocks_per_file":16,"dtype":"bfloat16","inference_engine":"vllm",` +
	`"model_name":"meta-llama/Llama-3.1-8B"}`

func newTree(t testing.TB) *tree {
	sum := sha256.Sum256([]byte(connectorFields))
	tr := &tree{t, t.TempDir(), "meta-llama_Llama-3.1-8B_" + hex.EncodeToString(sum[:])[:12]}
	// As Python writes it for people: other order, spaces.
	tr.write(tr.base+"/config.json", []byte(`{"model_name": "meta-llama/Llama-3.1-8B", "inference_engine": "vllm",
  "dtype": "bfloat16", "blocks_per_file": 16}`))
	return tr
}

func (tr *tree) write(rel string, b []byte) string {
	tr.Helper()
	name := filepath.Join(tr.dir, rel)
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		tr.Fatal(err)
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		tr.Fatal(err)
	}
	return name
}

const fileBytes = 64 << 10

// chunk writes one rank's file of the n-th key, used so many minutes ago.
func (tr *tree) chunk(n, rank, minutes int) string {
	tr.Helper()
	sum := sha256.Sum256([]byte{byte(n)})
	key := hex.EncodeToString(sum[:])
	name := tr.write(fmt.Sprintf("%s_r%d/%s/%s_g0/%s.bin", tr.base, rank, key[:3], key[3:5], key),
		bytes.Repeat([]byte{byte(n)}, fileBytes))
	tr.touch(name, minutes)
	return name
}

func (tr *tree) touch(name string, minutes int) {
	tr.Helper()
	then := time.Now().Add(-time.Duration(minutes) * time.Minute)
	if err := os.Chtimes(name, then, then.Add(-time.Hour)); err != nil { // read later than written
		tr.Fatal(err)
	}
}

func (tr *tree) there(name string) bool {
	tr.Helper()
	_, err := os.Stat(name)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		tr.Fatal(err)
	}
	return err == nil
}

// placeModule is the place policy llmd, linked in.
func placeModule() *policy.Module {
	return policy.NativeModule("llmd", []abi.Role{abi.RolePlace}, func(info guest.Info) (any, error) {
		return llmd.New(info)
	})
}

func (tr *tree) janitor(o Options) *Janitor {
	tr.Helper()
	o.Place = placeModule()
	j, err := New(context.Background(), tr.dir, o)
	if err != nil {
		tr.Fatal(err)
	}
	tr.Cleanup(func() { j.Close() })
	return j
}

func round(t testing.TB, j *Janitor) *Round {
	t.Helper()
	r, err := j.Round(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestConnectorDirectory: the least recently used entries go, with the files of all their ranks, and nothing else.
func TestConnectorDirectory(t *testing.T) {
	tr := newTree(t)
	var names [10][2]string
	for n := range 10 {
		for rank := range 2 {
			names[n][rank] = tr.chunk(n, rank, 100-n)
		}
	}
	tr.touch(names[0][1], 1) // one rank's file was read just now: the entry was used
	notes := tr.write("notes.txt", []byte("mine"))
	odd := tr.write(tr.base+"_r0/abc/de_g0/nothexadecimal.bin", make([]byte, 9000))
	young, old := tr.write(tr.base+"_r0/x_1.tmp", make([]byte, 5000)), tr.write(tr.base+"_r0/x_2.tmp", make([]byte, 5000))
	tr.touch(old, 3000)

	const capacity = 12*fileBytes + 40<<10
	dry := round(t, tr.janitor(Options{Capacity: capacity, Low: 1, TempAge: 24 * time.Hour, DryRun: true}))
	if dry.Removed.Files == 0 || !tr.there(names[1][0]) || !tr.there(old) {
		t.Errorf("a dry run: %+v", dry)
	}
	r := round(t, tr.janitor(Options{Capacity: capacity, Low: 1, TempAge: 24 * time.Hour}))
	if r.Removed != dry.Removed || r.Used != dry.Used {
		t.Errorf("it said %+v and did %+v", dry, r)
	}
	if r.Files.Files != 20 || r.Entries != 6 || r.Used > capacity || r.Unknown.Files != 4 || r.Temporaries.Files != 1 {
		t.Errorf("%+v", r)
	}
	for n := range 10 {
		want := n == 0 || n > 4
		if a, b := tr.there(names[n][0]), tr.there(names[n][1]); a != want || b != want {
			t.Errorf("entry %d: %t and %t, want %t", n, a, b, want)
		}
	}
	for _, name := range []string{notes, odd, young, filepath.Join(tr.dir, tr.base, "config.json")} {
		if !tr.there(name) {
			t.Errorf("%s is gone", name)
		}
	}
	if tr.there(old) {
		t.Error("the old temporary is still there")
	}
}

// TestRounds: what is new, used and gone between rounds reaches the policy; what fits is left alone.
func TestRounds(t *testing.T) {
	tr := newTree(t)
	j := tr.janitor(Options{Capacity: 4*fileBytes + 20<<10, Low: 1})
	var names []string
	for n := range 4 {
		names = append(names, tr.chunk(n, 0, 100-n))
	}
	if r := round(t, j); r.Removed.Files != 0 || r.Entries != 4 {
		t.Errorf("%+v", r)
	}
	tr.touch(names[0], 5) // used
	if err := os.Remove(names[1]); err != nil {
		t.Fatal(err)
	}
	names = append(names, tr.chunk(4, 0, 4), tr.chunk(5, 0, 3))
	r := round(t, j)
	if r.Entries != 4 || r.Removed.Files != 1 || tr.there(names[2]) || !tr.there(names[0]) || !tr.there(names[3]) {
		t.Errorf("%+v", r)
	}
}

// TestUsedMeanwhile: a victim that is read between the look and the removal is spared.
func TestUsedMeanwhile(t *testing.T) {
	tr := newTree(t)
	oldest := tr.chunk(0, 0, 100)
	next := tr.chunk(1, 0, 50)
	tr.chunk(2, 0, 10)
	j := tr.janitor(Options{
		Capacity: 2*fileBytes + 20<<10, Low: 1,
		FS: &reader{FS: staging.OS(), name: oldest, read: func() { tr.touch(oldest, 0) }},
	})
	r := round(t, j)
	if r.Spared != 1 || !tr.there(oldest) || tr.there(next) {
		t.Errorf("%+v", r)
	}
}

// reader reads a file before the second look at it.
type reader struct {
	staging.FS
	name  string
	looks int
	read  func()
}

func (f *reader) Stat(name string) (staging.Info, error) {
	if name == f.name {
		if f.looks++; f.looks == 2 {
			f.read()
		}
	}
	return f.FS.Stat(name)
}

// TestUnknownIsNotRemoved: files that nobody can identify fill the directory, and stay.
func TestUnknownIsNotRemoved(t *testing.T) {
	tr := newTree(t)
	big := tr.write("dataset.bin", make([]byte, 1<<20))
	name := tr.chunk(0, 0, 1)
	j := tr.janitor(Options{Capacity: 512 << 10})
	r, err := j.Round(context.Background())
	if !errors.Is(err, ErrOver) || !tr.there(big) || tr.there(name) {
		t.Errorf("%v, %+v", err, r)
	}
}

// TestPolicyFails: the built-in policy takes over.
func TestPolicyFails(t *testing.T) {
	tr := newTree(t)
	var names []string
	for n := range 4 {
		names = append(names, tr.chunk(n, 0, 100-n))
	}
	bad := policy.NativeModule("bad", []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) { return liar{}, nil })
	r := round(t, tr.janitor(Options{Capacity: 2*fileBytes + 20<<10, Low: 1, Evict: bad}))
	if tr.there(names[0]) || tr.there(names[1]) || !tr.there(names[2]) || r.Entries != 2 {
		t.Errorf("%+v", r)
	}
}

// liar names a slot that cannot be.
type liar struct{}

func (liar) Events([]abi.Event) {}

func (liar) Victims(_ abi.Ask, dst []uint32) int {
	dst[0] = 1 << 31
	return 1
}

func TestConnectorText(t *testing.T) {
	got, ok := connectorText([]byte(`{"model_name": "naïve/😀", "z": 1.50, "a": {"y": [1, 2], "b": "<&>"}}`))
	want := "extra.llmd.config=" + `{"a":{"b":"<&>","y":[1,2]},"model_name":"na\u00efve/\ud83d\ude00","z":1.50}` +
		"\nmodel=naïve/😀\n"
	if !ok || got != want {
		t.Errorf("%t\n%s\n%s", ok, got, want)
	}
	for _, bad := range []string{"", "[]", "{}", `{"model_name": 7}`, `{"model_name": "a\nb"}`} {
		if text, ok := connectorText([]byte(bad)); ok {
			t.Errorf("%s: %s", bad, text)
		}
	}
}

// TestLinkedFilesCountOnce gives a file a second name, which keeps its bytes when the first is evicted.
func TestLinkedFilesCountOnce(t *testing.T) {
	tr := newTree(t)
	old := tr.chunk(1, 0, 9)
	tr.chunk(2, 0, 5)
	tr.chunk(3, 0, 1)
	if err := os.Link(old, filepath.Join(tr.dir, "snapshot")); err != nil {
		t.Fatal(err)
	}
	j := tr.janitor(Options{Capacity: 1 << 30})
	r := round(t, j)
	config := int64(4096)
	if r.Used != 3*fileBytes+config {
		t.Errorf("%d bytes, want %d", r.Used, 3*fileBytes+config)
	}
	j.o.Capacity, j.o.Low = 2*fileBytes+2*config, 1
	if r = round(t, j); r.Used != 2*fileBytes+config || r.Removed.Files != 2 {
		t.Errorf("%d bytes after %+v were removed, want %d: the name alone gives nothing back", r.Used, r.Removed,
			2*fileBytes+config)
	}
}
