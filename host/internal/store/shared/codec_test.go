package shared

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/zeebo/xxh3"
)

func TestRecordRoundTrip(t *testing.T) {
	for _, r := range []Record{
		{
			Op: Published, Names: []pieceformat.Name{{Rank: 4, Path: "a/b"}}, Namespace: kv.Digest{1, 2}, Group: 3, Rank: 4, Key: kv.Key{5},
			Parent: kv.Key{6}, Depth: 7,
			Tenant: 8, Pieces: 1<<40 | 1<<4, Bytes: 1 << 33, StoreTime: 1 << 60,
		},
		{Op: Damaged, Key: kv.Key{31: 1}, Pieces: 3},
		{Op: Damaged, Key: kv.Key{31: 1}, Pieces: 3, Names: []pieceformat.Name{{Path: "a"}, {Path: "b"}, {Rank: 1, Path: "c/d"}}},
		{Op: Relayed, Key: kv.Key{1}, Bytes: 4096},
		{Op: Touched, Fingerprints: []uint64{1, 1 << 63, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}},
	} {
		b := r.Append(nil)
		got, n, err := DecodeRecord(append(b, b...))
		if err != nil || !reflect.DeepEqual(got, r) || n != len(b) {
			t.Errorf("%+v became %+v, %v", r, got, err)
		}
		for i := range b {
			b[i] ^= 1
			if _, _, err := DecodeRecord(b); !errors.Is(err, ErrDamaged) {
				t.Fatalf("a flip of byte %d is not seen: %v", i, err)
			}
			b[i] ^= 1
		}
	}
	for _, r := range []Record{
		{Op: 99, Key: kv.Key{1}}, {Op: Published}, {Op: Relayed, Key: kv.Key{1}, Bytes: -1}, {Op: Damaged, Key: kv.Key{1}, Rank: kv.MaxRanks},
		{Op: Touched}, {Op: Published, Key: kv.Key{1}, Names: []pieceformat.Name{{Path: "../a"}}},
	} {
		if _, _, err := DecodeRecord(r.Append(nil)); !errors.Is(err, ErrDamaged) {
			t.Errorf("%+v is read: error %v, want %v", r, err, ErrDamaged)
		}
	}
}

func FuzzRecord(f *testing.F) {
	r := Record{Op: Published, Key: kv.Key{1}, Bytes: 4096}
	f.Add(r.Append(nil))
	r = Record{Op: Touched, Fingerprints: []uint64{1, 2}}
	f.Add(r.Append(nil))
	r = Record{Op: Damaged, Key: kv.Key{1}, Pieces: 1, Names: []pieceformat.Name{{Path: "a/b"}}}
	f.Add(r.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, _, err := DecodeRecord(b)
		if err != nil {
			return
		}
		again, _, err := DecodeRecord(r.Append(nil))
		if err != nil || !reflect.DeepEqual(again, r) {
			t.Errorf("%+v became %+v, %v", r, again, err)
		}
	})
}

func FuzzControl(f *testing.F) {
	for _, v := range []any{status{Beat: 1, Vetoes: map[uint64][]uint16{3: {1, 2}}}, grantFile{7}, batchFile{Forget: "a.1"}} {
		b, err := EncodeControl(v)
		testenv.OK(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var s status
		if DecodeControl(b, &s) == nil {
			if _, err := EncodeControl(s); err != nil {
				t.Error(err)
			}
		}
		var batch batchFile
		if DecodeControl(b, &batch) == nil {
			_, _ = decodeVictims(batch.Victims)
		}
		_, _ = decodeLogHead(b)
	})
}

func TestControlSeesDamage(t *testing.T) {
	b, err := EncodeControl(grantFile{12345})
	testenv.OK(t, err)
	var g grantFile
	if err := DecodeControl(b, &g); err != nil || g.Granted != 12345 {
		t.Errorf("a grant is read as %+v, error %v, want what was written", g, err)
	}
	for i := range b {
		cut := bytes.Clone(b)
		cut[i] ^= 1
		if err := DecodeControl(cut, &g); !errors.Is(err, ErrDamaged) {
			t.Errorf("a flip of byte %d is not seen: %v", i, err)
		}
		if err := DecodeControl(b[:i], &g); !errors.Is(err, ErrDamaged) {
			t.Errorf("cut at %d: %v", i, err)
		}
	}
}

// FuzzLogHead reads heads with the right checksum, and writes them again.
func FuzzLogHead(f *testing.F) {
	f.Add(encodeLogHead(1 << 40))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= logHead {
			binary.LittleEndian.PutUint64(b[24:], xxh3.Hash(b[:24]))
		}
		published, err := decodeLogHead(b)
		if err == nil && published < 0 {
			t.Fatalf("a log of %d bytes", published)
		}
	})
}

// credited is a member in its first incarnation, with credit for 100 bytes.
func credited() *Member {
	m := &Member{cfg: Config{Lapse: time.Hour, Now: func() time.Duration { return 1 }}}
	m.presence.init(m.cfg.Lapse, m.cfg.Now, nil)
	m.credits.init(m.Fresh, m.Wake)
	m.beat(1)
	m.credits.reset(1)
	m.outbox.begin(1)
	m.grant(100)
	return m
}

// TestCreditAndRecordEndTogether: an incarnation ends while a put publishes. The put gives its credit back, and the next
// incarnation holds no bytes for it: a number below zero would be granted to others.
func TestCreditAndRecordEndTogether(t *testing.T) {
	m := credited()
	less, _ := m.Take(60)
	credit, ok := m.Take(40)
	if !ok || !m.enter(&doubt{record: Record{Bytes: 40}, credit: less}, &m.credits) || m.free() != 20 {
		t.Fatalf("%d bytes are free after 40 of 60 were written, and 40 taken of 100, want 20", m.free())
	}
	m.outbox.end() // as fence begins
	if m.enter(&doubt{record: Record{Bytes: 40}, credit: credit}, &m.credits) {
		t.Fatal("published in an incarnation that has ended")
	}
	m.credits.reset(0) // as fence ends
	if held := m.settle(0).Held; held != 40 {
		t.Errorf("%d bytes are held while the put goes on, want 40", held)
	}
	m.Give(credit)
	if held := m.settle(0).Held; held != 0 {
		t.Errorf("%d bytes are held when the put has ended, want 0", held)
	}
}

// lost has no answer to a publication. Meanwhile, the incarnation ends if fenced is set.
type lost struct {
	medium
	m      *Member
	fenced bool
}

func (l lost) store(*doubt) (bool, error) {
	if l.fenced {
		l.m.outbox.end()
	}
	return false, ErrDoubt
}

// TestADoubtHasOneOwner: the member keeps the credit of a publication in doubt, or else its put does, never both: each would
// take it from what is in flight.
func TestADoubtHasOneOwner(t *testing.T) {
	for _, fenced := range []bool{false, true} {
		m := credited()
		m.medium = lost{m: m, fenced: fenced}
		credit, _ := m.Take(40)
		err := m.Publish("temp", "target", Record{Bytes: 40}, &credit)
		if kept := credit.Bytes() == 0; kept == fenced || errors.Is(err, ErrDoubt) != kept || errors.Is(err, ErrFenced) == kept {
			t.Errorf("fenced meanwhile %t: error %v, and the put has credit for %d bytes", fenced, err, credit.Bytes())
		}
	}
}

// looked finds out what became of a publication. Its put goes on if writing is set, and the incarnation ends meanwhile if fenced is.
type looked struct {
	medium
	Backend
	m                           *Member
	made, over, writing, fenced bool
	err                         error
}

func (l looked) Learn(*Record) bool { return !l.writing }

func (l looked) happened(*doubt) (made, over bool, err error) {
	if l.fenced {
		l.m.outbox.end()
	}
	return l.made, l.over, l.err
}

// TestDoubtsSettle: the credit of a publication in doubt goes back once it is known that nothing was made, or nobody is left to spend it. It
// is spent once for a piece.
func TestDoubtsSettle(t *testing.T) {
	broken := errors.New("broken")
	for _, c := range []struct {
		looked
		free   int64 // of 100 bytes, of which the put has taken 40 and written 30
		doubts int
	}{
		{looked{}, 60, 1},
		{looked{over: true}, 100, 0},
		{looked{over: true, err: broken}, 60, 1},
		{looked{made: true, writing: true}, 60, 1},
		{looked{made: true}, 70, 0},
		{looked{made: true, fenced: true}, 100, 0},
		{looked{fenced: true}, 100, 0},
	} {
		m := credited()
		c.m, m.medium = m, lost{m: m}
		credit, _ := m.Take(40)
		if err := m.Publish("temp", "target", Record{Bytes: 30}, &credit); !errors.Is(err, ErrDoubt) {
			t.Fatal(err)
		}
		m.medium, m.back = c.looked, c.looked
		if err := m.settleDoubts(); !errors.Is(err, c.err) {
			t.Errorf("%+v: error %v", c, err)
		}
		if len(m.doubts) != c.doubts || m.free() != c.free {
			t.Errorf("%+v: %d in doubt and %d bytes free, want %d and %d", c, len(m.doubts), m.free(), c.doubts, c.free)
		}
	}
}

// TestAWishDecays: credit that is not used any more goes back, but for a little.
func TestAWishDecays(t *testing.T) {
	c := credits{granted: 1 << 20, taken: 1 << 16, largest: 1 << 10}
	before := c.settle(1 << 20)
	for range 40 {
		c.settle(1 << 16)
	}
	if now := c.settle(1 << 16); now.Want != 4<<10 || now.Free != now.Want || now.Returned != 1<<20-now.Want {
		t.Errorf("%+v after a while, and %+v before, want %d wanted and free", now, before, 4<<10)
	}
}

// TestLogsAreRead: a log is read as it was written, and none that was cut off or changed.
func TestLogsAreRead(t *testing.T) {
	records := []Record{
		{Op: Published, Key: modelKey(1), Bytes: 4096, Pieces: 1}, {Op: Relayed, Key: modelKey(2), Bytes: 8192, Pieces: 2},
		{Op: Touched, Fingerprints: []uint64{3, 4}},
	}
	b := encodeLog(1<<40, records)
	published, got, err := decodeLog(b)
	if err != nil || published != 1<<40+4096 || !reflect.DeepEqual(got, records) {
		t.Errorf("%d bytes, %+v, %v; want %d and what was written", published, got, err, 1<<40+4096)
	}
	for i := range b {
		bad := append([]byte(nil), b...)
		bad[i] ^= 1
		for _, b := range [][]byte{b[:i], bad} {
			if _, got, err := decodeLog(b); err == nil && len(got) == len(records) || err != nil && !errors.Is(err, ErrDamaged) {
				t.Fatalf("byte %d: %d records, %v; want %v or fewer records", i, len(got), err, ErrDamaged)
			}
		}
	}
	if _, _, err := decodeLog(end); !errors.Is(err, ErrDamaged) {
		t.Errorf("an end was read as a log: %v, want %v", err, ErrDamaged)
	}
}

// FuzzObjects reads any bytes as each object of the protocol.
func FuzzObjects(f *testing.F) {
	log := encodeLog(1, []Record{{Op: Published, Key: modelKey(1), Bytes: 1}})
	f.Add(log)
	for _, v := range []any{
		objectStatus{status: status{Beat: 1, Vetoes: map[uint64][]uint16{3: {1}}, claim: claim{Want: 7}}},
		evictor{Term: 1, Owner: "a.1", Grants: map[string]*grant{"a.1": {Granted: 4096}}, Batches: map[uint64]*batchOutcome{1: {Forget: "b.1"}}},
	} {
		b, err := EncodeControl(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"seats":{"a.1":null}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if text, err := EncodeControl(json.RawMessage(b)); err == nil && len(b) > 0 && b[0] == '{' {
			b = text // of text that no host wrote, with a checksum that fits
		}
		if published, records, err := decodeLog(b); err == nil {
			a := attempt{records: records}
			if again := encodeLog(published-a.published(), records); string(again) != string(b) && len(again) != len(b) {
				t.Fatalf("%d bytes are %d when written again", len(b), len(again))
			}
		}
		var s objectStatus
		_ = s.decode(b)
		if o, err := decodeEvictor(b); err == nil {
			if _, err := EncodeControl(o); err != nil {
				t.Fatal(err)
			}
		}
	})
}
