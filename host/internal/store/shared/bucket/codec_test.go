package bucket

import (
	"encoding/json"
	"errors"
	"reflect"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/shared"
)

// TestLogsAreRead: a log is read as it was written, and none that was cut off or changed.
func TestLogsAreRead(t *testing.T) {
	records := []shared.Record{
		{Op: shared.Published, Key: modelKey(1), Bytes: 4096, Pieces: 1}, {Op: shared.Relayed, Key: modelKey(2), Bytes: 8192, Pieces: 2},
		{Op: shared.Touched, Fingerprints: []uint64{3, 4}},
	}
	b, more := encodeLog(1<<40, records)
	published, got, err := decodeLog(b)
	if err != nil || more != 4096 || published != 1<<40+4096 || !reflect.DeepEqual(got, records) {
		t.Errorf("%d bytes, %+v, %v; want %d and what was written", published, got, err, 1<<40+4096)
	}
	for i := range b {
		bad := append([]byte(nil), b...)
		bad[i] ^= 1
		for _, b := range [][]byte{b[:i], bad} {
			if _, got, err := decodeLog(b); err == nil && len(got) == len(records) || err != nil && !errors.Is(err, shared.ErrDamaged) {
				t.Fatalf("byte %d: %d records, %v; want %v or fewer records", i, len(got), err, shared.ErrDamaged)
			}
		}
	}
	if _, _, err := decodeLog(end); !errors.Is(err, shared.ErrDamaged) {
		t.Errorf("an end was read as a log: %v, want %v", err, shared.ErrDamaged)
	}
}

// FuzzObjects reads any bytes as each object of the protocol.
func FuzzObjects(f *testing.F) {
	log, _ := encodeLog(1, []shared.Record{{Op: shared.Published, Key: modelKey(1), Bytes: 1}})
	f.Add(log)
	for _, v := range []any{
		status{Beat: 1, Vetoes: map[uint64][]int{3: {1}}, Claim: shared.Claim{Want: 7}},
		evictor{Term: 1, Owner: "a.1", Grants: map[string]*grant{"a.1": {Granted: 4096}}, Batches: map[uint64]*batch{1: {Forget: "b.1"}}},
	} {
		b, err := shared.EncodeControl(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"seats":{"a.1":null}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if text, err := shared.EncodeControl(json.RawMessage(b)); err == nil && len(b) > 0 && b[0] == '{' {
			b = text // of text that no host wrote, with a checksum that fits
		}
		if published, records, err := decodeLog(b); err == nil {
			more := int64(0)
			for i := range records {
				if records[i].Op == shared.Published {
					more += records[i].Bytes
				}
			}
			if again, _ := encodeLog(published-more, records); string(again) != string(b) && len(again) != len(b) {
				t.Fatalf("%d bytes are %d when written again", len(b), len(again))
			}
		}
		var s status
		_ = shared.DecodeControl(b, &s)
		if o, err := decodeEvictor(b); err == nil {
			c := o.clone()
			if _, err := shared.EncodeControl(&c); err != nil {
				t.Fatal(err)
			}
		}
	})
}
