package shared

import (
	"slices"
	"sync"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// outbox holds what a member has not logged yet: entries published, touched or found damaged, and publications in doubt.
type outbox struct {
	wake func()

	mu           sync.Mutex
	life         uint64
	records      []Record
	temps        []string // temporaries of published pieces, to be removed once the records are logged
	fingerprints []uint64
	held         map[uint64]struct{}
	doubts       []doubt
}

// maxTouches is the maximum number of touches logged in one step. Further touches are dropped.
const maxTouches = 1 << 13

// init sets the function that requests a step without waiting for the next poll.
func (o *outbox) init(wake func()) { o.wake = wake }

// end discards the records of an incarnation that ended, and returns its publications in doubt.
func (o *outbox) end() []doubt {
	o.mu.Lock()
	defer o.mu.Unlock()
	doubts := o.doubts
	o.life, o.records, o.temps, o.fingerprints, o.held, o.doubts = 0, nil, nil, nil, nil, nil
	return doubts
}

// begin starts the next incarnation. Records of damaged entries that were added since End are kept.
func (o *outbox) begin(life uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.life, o.held = life, map[uint64]struct{}{}
}

// enter adds the record of a published piece, and spends its credit. Both happen together, because the records of an
// incarnation end before its credit does. It returns false if the credit is void: the evictor then finds the piece.
func (o *outbox) enter(d *doubt, of *credits) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.life != d.credit.life || !of.spend(d.credit, d.record.Bytes) {
		return false
	}
	o.records, o.temps = append(o.records, d.record), append(o.temps, d.temp)
	return true
}

// doubt adds a publication in doubt. It returns false if the credit is void.
func (o *outbox) doubt(d doubt) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.life != d.credit.life {
		return false
	}
	o.doubts = append(o.doubts, d)
	return true
}

func (o *outbox) takeDoubts() []doubt {
	o.mu.Lock()
	defer o.mu.Unlock()
	doubts := o.doubts
	o.doubts = nil
	return doubts
}

// sure reports whether no publication is in doubt.
func (o *outbox) sure() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.doubts) == 0
}

// Touch adds the use of an entry, which is logged at the next step.
func (o *outbox) Touch(fingerprint uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, again := o.held[fingerprint]; again || len(o.fingerprints) == maxTouches || o.held == nil {
		return
	}
	o.held[fingerprint] = struct{}{}
	o.fingerprints = append(o.fingerprints, fingerprint)
}

// ReportDamaged adds the record of a damaged entry, which is logged at the next step. r.Pieces holds the ranks to remove.
func (o *outbox) ReportDamaged(r Record) {
	r.Op = Damaged
	o.mu.Lock()
	o.records = append(o.records, r)
	o.mu.Unlock()
	o.wake()
}

// relay adds the record of a piece that another member has not logged. temp is its temporary if there is one.
func (o *outbox) relay(r Record, temp string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.records, o.temps = append(o.records, r), append(o.temps, temp)
}

// attempt is a write of the log. A failed attempt is repeated unchanged before any other.
type attempt struct {
	records []Record
	temps   []string // temporaries to remove after it
}

// published returns the bytes of the pieces that an attempt publishes.
func (a *attempt) published() (n int64) {
	for i := range a.records {
		if a.records[i].Op == Published {
			n += a.records[i].Bytes
		}
	}
	return n
}

// partBytes is about the largest part of an attempt that is written at once: one log object.
const partBytes = 4 << 20

// part returns the first records of an attempt, with the temporaries only if they are the last.
func (a *attempt) part() *attempt {
	size := 0
	for i := range a.records {
		if size += recordBytes + pieceformat.NamesBytes(a.records[i].Names); size > partBytes && i > 0 {
			return &attempt{records: a.records[:i]}
		}
	}
	return a
}

// take returns what is to be logged.
func (o *outbox) take() *attempt {
	o.mu.Lock()
	defer o.mu.Unlock()
	a := &attempt{o.records, o.temps}
	for part := range slices.Chunk(o.fingerprints, recordFingerprints) {
		a.records = append(a.records, Record{Op: Touched, Fingerprints: part})
	}
	o.records, o.temps, o.fingerprints = nil, nil, nil
	clear(o.held)
	return a
}
