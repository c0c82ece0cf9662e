package pieceformat

import (
	"encoding/hex"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/kv"
)

// file is a file in memory.
type file []byte

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	for int64(len(*f)) < off+int64(len(p)) {
		*f = append(*f, 0)
	}
	return copy((*f)[off:], p), nil
}

// TestFormatExamples compares the examples of docs/formats.md with what is written. A difference is a new format: see the
// section on how to change one.
func TestFormatExamples(t *testing.T) {
	text, err := os.ReadFile("testdata/examples.txt")
	must(t, err)
	_, piece := goldenHeader(t)
	_, compressed := goldenCompressed(t)
	for name, image := range map[string][]byte{
		"header":     piece[:offEnd],
		"stored":     compressed[Page:][:2*storedBytes],
		"checkpoint": exampleCheckpoint(t),
		"touches":    exampleTouches(t),
		"state":      (&State{Time: 5, Slots: 3, Format: "lru/1", Data: []byte{1, 2, 3}}).Encode(),
		"written":    EncodeWritten(20_000, 4096),
		"plan":       goldenPlan(t).Encoded(),
	} {
		if dump := hex.Dump(image); !strings.Contains("\n"+string(text)+"\n", "\n"+name+"\n"+dump+"\n") {
			t.Errorf("testdata/examples.txt does not have this as %s:\n%s", name, dump)
		}
	}
}

func exampleCheckpoint(t *testing.T) []byte {
	var key kv.Key
	for i := range key {
		key[i] = byte(0xa0 + i)
	}
	short := key
	clear(short[16:])
	owners := []CheckpointOwner{
		{Namespace: kv.Digest{1, 2, 3}, Group: 4, Tenant: 5, TTL: time.Second},
	}
	entries := []*CheckpointEntry{
		{Slot: 0, State: StateComplete, LastTouch: 9, Units: 10, Depth: 11, Pieces: 3, Key: short},
		{
			Slot: 2, State: StateNamed, Parent: 0x1112131415161718, LastTouch: 8, Units: 10, Depth: 12, Pieces: 1 << 9,
			Missing: 2, Expires: 0x21222324, Key: key, Names: []Name{{Rank: 9, Path: "a/b"}},
		},
	}
	var f file
	err := WriteCheckpoint(&f, Checkpoint{Time: 7, High: 3, Clock: 9, Entries: 2}, owners,
		func(yield func(*CheckpointEntry) bool) {
			for _, e := range entries {
				if !yield(e) {
					return
				}
			}
		})
	must(t, err)
	return f
}

func exampleTouches(t *testing.T) []byte {
	var f file
	must(t, WriteTouches(&f, 7, 2, func(i int) uint64 { return uint64(i + 1) }))
	return f
}

// collector keeps what a checkpoint has.
type collector struct {
	owners  []CheckpointOwner
	entries []CheckpointEntry
}

func (c *collector) Head(Checkpoint) error          { return nil }
func (c *collector) Owner(o *CheckpointOwner) error { c.owners = append(c.owners, *o); return nil }
func (c *collector) Entry(e *CheckpointEntry) error { c.entries = append(c.entries, *e); return nil }

// TestDecodeWhatWasEncoded reads the examples back.
func TestDecodeWhatWasEncoded(t *testing.T) {
	image := exampleCheckpoint(t)
	var c collector
	head, err := ReadCheckpoint(strings.NewReader(string(image)), int64(len(image)), &c)
	if err != nil || head.Entries != 2 || len(c.owners) != 1 || len(c.entries) != 2 {
		t.Fatalf("%+v, %d owners, %d entries, %v", head, len(c.owners), len(c.entries), err)
	}
	if e := c.entries[1]; e.Missing != 2 || e.Expires != 0x21222324 || e.Pieces != 1<<9 || e.Key[31] != 0xbf ||
		e.State != StateNamed || !slices.Equal(e.Names, []Name{{Rank: 9, Path: "a/b"}}) {
		t.Errorf("%+v", e)
	}
	var fps []uint64
	image = exampleTouches(t)
	when, err := ReadTouches(strings.NewReader(string(image)), int64(len(image)), func(l []uint64) {
		fps = append(fps, l...)
	})
	if err != nil || when != 7 || len(fps) != 2 || fps[1] != 2 {
		t.Errorf("touches %v of %d, %v", fps, when, err)
	}
}
