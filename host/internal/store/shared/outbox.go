package shared

import (
	"slices"
	"sync"
)

// Outbox holds the records that a member has not logged yet: entries published, touched or found damaged.
type Outbox struct {
	wake func()

	mu           sync.Mutex
	life         uint64
	records      []Record
	fingerprints []uint64
	held         map[uint64]struct{}
}

// maxTouches is the maximum number of touches logged in one step. Further touches are dropped.
const maxTouches = 1 << 13

// Init sets the function that requests a step without waiting for the next poll.
func (o *Outbox) Init(wake func()) { o.wake = wake }

// End discards the records of an incarnation that ended.
func (o *Outbox) End() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.life, o.records, o.fingerprints, o.held = 0, nil, nil, nil
}

// Begin starts the next incarnation. Records of damaged entries that were added since End are kept.
func (o *Outbox) Begin(life uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.life, o.held = life, map[uint64]struct{}{}
}

// Published adds the record of a published piece, and spends its credit. It returns false if the credit is void.
func (o *Outbox) Published(r Record, credit Credit, of *Credits) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.publish(r, credit, of)
}

// publish adds the record and spends the credit together, because the records of an incarnation end before its credit does.
// o.mu must be held.
func (o *Outbox) publish(r Record, credit Credit, of *Credits) bool {
	if o.life != credit.life || !of.Spend(credit, r.Bytes) {
		return false
	}
	o.records = append(o.records, r)
	return true
}

// Touch adds the use of an entry, which is logged at the next step.
func (o *Outbox) Touch(fingerprint uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, again := o.held[fingerprint]; again || len(o.fingerprints) == maxTouches || o.held == nil {
		return
	}
	o.held[fingerprint] = struct{}{}
	o.fingerprints = append(o.fingerprints, fingerprint)
}

// ReportDamaged adds the record of a damaged entry, which is logged at the next step. r.Pieces holds the ranks to remove.
func (o *Outbox) ReportDamaged(r Record) {
	r.Op = Damaged
	o.mu.Lock()
	o.records = append(o.records, r)
	o.mu.Unlock()
	o.wake()
}

func (o *Outbox) Drain() []Record {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.take()
}

func (o *Outbox) take() []Record {
	records := o.records
	for part := range slices.Chunk(o.fingerprints, recordFingerprints) {
		records = append(records, Record{Op: Touched, Fingerprints: part})
	}
	o.records, o.fingerprints = nil, nil
	clear(o.held)
	return records
}

// Relay adds the record of another member's piece.
func (o *Outbox) Relay(r Record) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.records = append(o.records, r)
}
