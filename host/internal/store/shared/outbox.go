package shared

import (
	"slices"
	"sync"
)

// Outbox is what a member published, touched or found damaged and has not logged yet.
type Outbox struct {
	wake func()

	mu           sync.Mutex
	life         uint64
	records      []Record
	fingerprints []uint64
	held         map[uint64]struct{}
}

// maxTouches bounds the touches logged in one step; the first ones are logged.
const maxTouches = 1 << 13

// Init says what is called when something cannot wait.
func (o *Outbox) Init(wake func()) { o.wake = wake }

// End forgets everything with an incarnation.
func (o *Outbox) End() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.life, o.records, o.fingerprints, o.held = 0, nil, nil, nil
}

// Begin follows when the next incarnation begins. What was found damaged since the end is kept.
func (o *Outbox) Begin(life uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.life, o.held = life, map[uint64]struct{}{}
}

// Published notes the publication of a piece, and spends its credit. It is false when the credit is void.
func (o *Outbox) Published(r Record, credit Credit, of *Credits) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.publish(r, credit, of)
}

// publish spends credit only with its record: an incarnation's records end before its credit does. The lock is held.
func (o *Outbox) publish(r Record, credit Credit, of *Credits) bool {
	if o.life != credit.life || !of.Spend(credit, r.Bytes) {
		return false
	}
	o.records = append(o.records, r)
	return true
}

// Touch tells the others at the next step that an entry was used.
func (o *Outbox) Touch(fingerprint uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, again := o.held[fingerprint]; again || len(o.fingerprints) == maxTouches || o.held == nil {
		return
	}
	o.held[fingerprint] = struct{}{}
	o.fingerprints = append(o.fingerprints, fingerprint)
}

// ReportDamaged tells the evictor at the next step that an entry is damaged. r.Pieces are the ranks to remove.
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

// Relay has a record of another member's piece logged.
func (o *Outbox) Relay(r Record) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.records = append(o.records, r)
}
