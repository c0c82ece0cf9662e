package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// The evictor grants what its account leaves of the capacity: a piece on the disk that is not in the account takes room
// that others were granted. Every host must count every piece, as it may be the evictor next.

// record is what another host logs of a piece.
func (r *rig) record(h *pieceformat.Header) *shared.Record {
	return &shared.Record{
		Op: shared.Published, Namespace: h.Namespace, Group: h.Group, Rank: h.Rank, Key: h.Key, Pieces: h.Pieces,
		Bytes: r.class.FileBytes(), StoreTime: h.StoreTime,
	}
}

// TestAVictimHasMorePieces: the evictor, or whoever reported the victim, did not know of a piece that another host had
// published. The piece stays when the victim goes.
func TestAVictimHasMorePieces(t *testing.T) {
	for _, when := range []string{"known before the proposal", "learned after it", "found after it"} {
		t.Run(when, func(t *testing.T) {
			r := newRig(t)
			name := r.stored(1)
			other, more := r.write(1, 1)
			if when == "known before the proposal" {
				r.found(other, more)
			}
			v := r.proposed(1)
			switch when {
			case "learned after it":
				r.b.Learn(r.record(more))
			case "found after it":
				r.found(other, more)
			}
			r.must(os.Remove(name))
			r.b.Decide(v, true)
			r.expect("decided", 1, 0)
		})
	}
}

// TestAVictimIsStoredElsewhere: a host that has applied the decision stores the victim again. Logs are read before the
// journal, so the others learn of the new piece while the old one is withheld.
func TestAVictimIsStoredElsewhere(t *testing.T) {
	r := newRig(t)
	name := r.stored(1)
	v := r.proposed(1)
	r.must(os.Remove(name))
	_, h := r.write(1, 0)
	r.b.Learn(r.record(h))
	r.b.Decide(v, true)
	r.expect("decided", 1, 0)
}

// TestAVetoEndsAReport: a put finds its name taken by a damaged file and is slow to end, so that this host vetoes what it
// has reported itself. The key is not withheld for ever.
func TestAVetoEndsAReport(t *testing.T) {
	r := newRig(t)
	var credit shared.Credit
	m, err := r.begin(1, &credit)
	r.must(err)
	name, h := r.write(1, 0)
	r.must(os.Truncate(name, pieceformat.Page))
	taken := func() {
		r.reportDamaged(r.class, shared.Record{Namespace: h.Namespace, Group: h.Group, Key: h.Key, Pieces: 1})
	}
	taken()
	r.pass(4)
	r.end(m, credit)
	credit = shared.Credit{}
	m, err = r.begin(1, &credit)
	r.must(err)
	taken()
	r.end(m, credit)
	r.pass(4)
	if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a put that has ended is in the way: %v", err)
	}
	r.expect("removed", 0, 0)
}

// TestASparedVictimIsDamaged: nobody can serve its file, which is there all the same.
func TestASparedVictimIsDamaged(t *testing.T) {
	r := newRig(t)
	name := r.stored(1)
	v := r.proposed(1)
	f, err := os.OpenFile(name, os.O_WRONLY, 0)
	r.must(err)
	_, err = f.WriteAt(make([]byte, pieceformat.Page), 0)
	r.must(err)
	r.must(f.Close())
	r.b.Decide(v, false)
	r.expect("spared", 0, 1)
	r.must(r.rescan(t.Context()))
	r.expect("after a scan", 0, 1)
}

// TestASparedVictimIsStored: a put of the key begins between the decision and the look at the file.
func TestASparedVictimIsStored(t *testing.T) {
	r := newRig(t)
	name := r.stored(1)
	v := r.proposed(1)
	r.faults.Set(faultfs.MustRules("open " + name + " 1st: hang")...)
	ctx, decided := context.WithCancel(t.Context())
	go func() {
		defer decided()
		r.b.Decide(v, false)
	}()
	r.must(r.faults.AwaitHanging(ctx, 1))
	var credit shared.Credit
	m, err := r.begin(1, &credit)
	r.must(err)
	r.faults.Set()
	<-ctx.Done()
	r.expect("while it is written", 1, 1)
	r.end(m, credit)
	r.pass(1)
	r.expect("the put has come to nothing", 1, 0)
}

// TestStoredAgainWhileItGoes: this host finds that a piece has gone and drops its entry; another host publishes the
// piece anew before the entry has left.
func TestStoredAgainWhileItGoes(t *testing.T) {
	r := newRig(t)
	name := r.stored(1)
	r.must(os.Remove(name))
	v := r.leave(r.slot(1))
	_, h := r.write(1, 0)
	rec := r.record(h)
	learned := r.b.Learn(rec)
	r.set.Lock()
	r.set.FinishEvict(&v)
	r.set.Unlock()
	if !learned { // as a member does at its next step
		learned = r.b.Learn(rec)
	}
	if !learned {
		t.Error("it is still awaited")
	}
	r.expect("learned", 1, 0)
}

// TestDecidedWhileItGoes: the others decide about an entry that was reported before it has left this host's index.
func TestDecidedWhileItGoes(t *testing.T) {
	for _, removed := range []bool{true, false} {
		t.Run(fmt.Sprintf("removed=%t", removed), func(t *testing.T) {
			r := newRig(t)
			name := r.stored(1)
			e := r.leave(r.slot(1))
			v := r.proposed(1)
			want := int64(1)
			if removed {
				r.must(os.Remove(name))
				want = 0
			}
			r.b.Decide(v, removed)
			r.set.Lock()
			r.set.FinishEvict(&e)
			r.set.Unlock()
			r.lookAgain()
			r.expect("decided", want, 0)
		})
	}
}
