package sharedroot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"testing"

	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// The evictor grants what its account leaves of the capacity: a piece on the disk that is not in the account takes room
// that others were granted. Every host must count every piece, as it may be the evictor next.

// victim names rank 0 of a key's entry.
func (r *rig) victim(h *pieceformat.Header) *shared.Victim {
	return &shared.Victim{Namespace: h.Namespace, Group: h.Group, Key: h.Key, Pieces: 1, Bytes: r.class.FileBytes()}
}

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
			b := backend{r.Root}
			name, h := r.write(1, 0)
			r.found(name, h)
			other, more := r.write(1, 1)
			if when == "known before the proposal" {
				r.found(other, more)
			}
			v := r.victim(h)
			if !b.Propose(v) {
				t.Fatal("an entry that nobody uses is vetoed")
			}
			switch when {
			case "learned after it":
				b.Learn(r.record(more))
			case "found after it":
				r.found(other, more)
			}
			r.must(os.Remove(name))
			b.Decide(v, true)
			r.expect("decided", 1, 0)
		})
	}
}

// TestAVictimIsStoredElsewhere: a host that has applied the decision stores the victim again. Logs are read before the
// journal, so the others learn of the new piece while the old one is withheld.
func TestAVictimIsStoredElsewhere(t *testing.T) {
	r := newRig(t)
	b := backend{r.Root}
	name, h := r.write(1, 0)
	r.found(name, h)
	v := r.victim(h)
	if !b.Propose(v) {
		t.Fatal("an entry that nobody uses is vetoed")
	}
	r.must(os.Remove(name))
	_, h = r.write(1, 0)
	b.Learn(r.record(h))
	b.Decide(v, true)
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
		r.ReportDamaged(shared.Record{Namespace: h.Namespace, Group: h.Group, Key: h.Key, Pieces: 1})
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
	b := backend{r.Root}
	name, h := r.write(1, 0)
	r.found(name, h)
	v := r.victim(h)
	b.Propose(v)
	f, err := os.OpenFile(name, os.O_WRONLY, 0)
	r.must(err)
	_, err = f.WriteAt(make([]byte, pieceformat.Page), 0)
	r.must(err)
	r.must(f.Close())
	b.Decide(v, false)
	r.expect("spared", 0, 1)
	r.must(r.Rescan(t.Context()))
	r.expect("after a scan", 0, 1)
}

// TestASparedVictimIsStored: a put of the key begins between the decision and the look at the file.
func TestASparedVictimIsStored(t *testing.T) {
	r := newRig(t)
	b := backend{r.Root}
	name, h := r.write(1, 0)
	r.found(name, h)
	v := r.victim(h)
	b.Propose(v)
	r.faults.Set(faultfs.MustRules("open " + name + " 1st: hang")...)
	ctx, decided := context.WithCancel(t.Context())
	go func() {
		defer decided()
		b.Decide(v, false)
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
	name, h := r.write(1, 0)
	r.found(name, h)
	r.must(os.Remove(name))
	r.set.Lock()
	v := r.set.BeginEvict(r.set.Index.Find(fingerprint(h), r.class.Base, &h.Key))
	r.set.Unlock()
	r.Unlink(&v, v.Pieces)
	_, h = r.write(1, 0)
	rec := r.record(h)
	learned := backend{r.Root}.Learn(rec)
	r.set.Lock()
	r.set.FinishEvict(&v)
	r.set.Unlock()
	if !learned { // as a member does at its next step
		learned = backend{r.Root}.Learn(rec)
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
			b := backend{r.Root}
			name, h := r.write(1, 0)
			r.found(name, h)
			r.set.Lock()
			e := r.set.BeginEvict(r.set.Index.Find(fingerprint(h), r.class.Base, &h.Key))
			r.set.Unlock()
			r.Unlink(&e, e.Pieces)
			v := r.victim(h)
			if !b.Propose(v) {
				t.Fatal("vetoed")
			}
			want := int64(1)
			if removed {
				r.must(os.Remove(name))
				want = 0
			}
			b.Decide(v, removed)
			r.set.Lock()
			r.set.FinishEvict(&e)
			r.set.Unlock()
			r.lookAgain()
			r.expect("decided", want, 0)
		})
	}
}
