package shared

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// bucket is the [medium] of a root in a bucket.
type bucket struct {
	m *Member

	// of this incarnation
	told     objectStatus // last written
	toldAt   time.Duration
	version  string // of the last written status
	logged   uint64 // number of the last log object written
	kept     []keptLog
	readings map[string]*reading

	evictor *evictor // as last read or written; nil if the object does not exist
	over    string   // the object's version; empty if it does not exist

	// of this host's term
	wroteAt time.Duration
	cleaned bool   // set once leftovers of earlier terms are removed
	ticket  uint64 // ticket of this host's scan when the term began
}

// reading is what this member has read of another member.
type reading struct {
	version string // of the member's object
	written
	next uint64 // number of the next log object to read
	past bool   // set if the member was gone before this host was admitted; its log is not read
	bad  int    // steps in which the next log object was damaged
}

// written is the part of a member's object that only a bucket has.
type written struct {
	Log       uint64 `json:"log"`       // number of its last log object
	Published int64  `json:"published"` // bytes published according to its logs
	Granted   int64  `json:"granted"`   // its grant's Granted as the member read it last
}

// objectStatus is the content of a member's object below hosts.
type objectStatus struct {
	written
	status
}

// landing returns the time after which an abandoned request of a host that is not paused can no longer take effect.
func (c *Config) landing() time.Duration { return 2 * c.Lapse }

// mostLogs is above the number of log objects that any member writes. logsAtOnce limits the log objects read in one step, and
// logsInMemory those that are read before the first of them is applied.
const (
	mostLogs     = 1 << 32
	logsAtOnce   = 1 << 10
	logsInMemory = 8
)

func (s *objectStatus) decode(b []byte) error {
	err := cmp.Or(DecodeControl(b, s), s.check())
	if err == nil && s.Log > mostLogs {
		err = fmt.Errorf("%w: %d logs", ErrDamaged, s.Log)
	}
	return err
}

// evictor is the content of the evictor's object.
type evictor struct {
	Term    uint64                   `json:"term"`
	Owner   string                   `json:"owner"` // empty if the evictor has left
	Beat    uint64                   `json:"beat"`
	Grants  map[string]*grant        `json:"seats"`
	Batches map[uint64]*batchOutcome `json:"batches"`
}

// grant is the evictor's account of one member.
type grant struct {
	Granted int64  `json:"granted"`
	Spent   int64  `json:"spent,omitempty"` // least part of Granted that was published or returned, once the member is gone; else 0
	End     uint64 `json:"end,omitempty"`   // number after the last log object with records, once the member is gone; else 0
}

// batchOutcome is a batch without its victims, which are an object of their own.
type batchOutcome struct {
	Forget  string `json:"forget,omitempty"`
	Decided bool   `json:"decided,omitempty"`
	decision
}

func decodeEvictor(b []byte) (*evictor, error) {
	var o evictor
	if err := DecodeControl(b, &o); err != nil {
		return nil, err
	}
	for name, s := range o.Grants {
		if s == nil || s.End > mostLogs+1 || min(s.Granted, s.Spent) < 0 || max(s.Granted, s.Spent) > mostTotal {
			return nil, fmt.Errorf("%w: no grant of %s: %+v", ErrDamaged, name, s)
		}
	}
	for n, b := range o.Batches {
		if b == nil {
			return nil, fmt.Errorf("%w: no batch %d", ErrDamaged, n)
		}
	}
	return &o, nil
}

// join writes the object of a new incarnation and removes the objects of earlier ones, which the evictor then declares dead.
func (b *bucket) join() error {
	m := b.m
	b.told, b.logged, b.kept, b.readings = objectStatus{status: status{Beat: 1}}, 0, nil, map[string]*reading{}
	m.told.Beat = 1
	data, err := EncodeControl(&b.told)
	if err != nil {
		return err
	}
	if b.version, err = m.cfg.Objects.Put("hosts/"+m.name, data, ""); err != nil {
		return err
	}
	list, err := m.cfg.Objects.List("hosts")
	if err != nil {
		return err
	}
	for _, other := range slices.Sorted(maps.Keys(list)) {
		if other != m.name && m.isOwn(other) {
			if err := m.cfg.Objects.Remove("hosts/" + other); err != nil {
				return err
			}
		}
	}
	return nil
}

// look reads the evictor's object, and then lists the members and reads the statuses that have changed.
func (b *bucket) look(now time.Duration) error {
	m := b.m
	if err := b.readEvictor(now); err != nil {
		return err
	}
	m.view = view{}
	if o := b.evictor; o != nil {
		m.view = view{number: o.Term, owner: o.Owner, batches: map[uint64]bool{}}
		for n, v := range o.Batches {
			m.view.batches[n] = v.Decided
		}
	}
	g := b.grantOf(m.name)
	if m.admitted && g == nil || g != nil && g.End > 0 {
		return ErrFenced
	} else if g != nil {
		m.view.admits, m.view.granted = true, g.Granted
	}
	return b.readMembers(now)
}

// grantOf returns the grant of a member, or nil if it has none.
func (b *bucket) grantOf(name string) *grant {
	if b.evictor == nil {
		return nil
	}
	return b.evictor.Grants[name]
}

// readEvictor reads the evictor's object, and notes the time if it has changed.
func (b *bucket) readEvictor(now time.Duration) error {
	m := b.m
	data, version, err := m.cfg.Objects.Get("evictor", b.over, mostRecord)
	if errors.Is(err, fs.ErrNotExist) {
		if b.evictor != nil || m.seenAt == 0 {
			m.seenAt = max(1, now)
		}
		b.evictor, b.over, m.term = nil, "", nil
		return nil
	}
	if err != nil || version == b.over {
		return err
	}
	o, err := decodeEvictor(data)
	if err != nil { // A damaged object counts as removed. Otherwise no host could replace it.
		m.log.Error("the evictor's object is damaged; a new one is made", "error", err)
		b.evictor, b.over, m.seenAt, m.term = nil, version, now, nil
		return nil
	}
	b.over, m.seenAt = version, now
	if m.term != nil && (o.Owner != m.name || o.Term != m.term.number) {
		m.log.Warn("another host is the evictor now", "term", o.Term)
		m.term = nil
	}
	b.evictor = o
	if m.term == nil && o.Owner == m.name { // The write that elected this host had no answer. It may be so old that another host has been elected since.
		b.begin()
		b.wrote(now - m.cfg.Lapse)
	}
	return nil
}

// readMembers lists the members and reads the statuses that have changed.
func (b *bucket) readMembers(now time.Duration) error {
	m := b.m
	list, err := m.cfg.Objects.List("hosts")
	if err != nil {
		return err
	}
	if _, here := list[m.name]; !here {
		return ErrFenced
	}
	var changed []request
	for _, name := range slices.Sorted(maps.Keys(list)) {
		m.peer(name).here = true
		if b.reading(name).version != list[name] && name != m.name {
			changed = append(changed, request{member: name, name: "hosts/" + name})
		}
	}
	b.fetch(changed, mostStatus(len(m.peers)), func(q *request) {
		if q.err == nil {
			q.damaged = q.status.decode(q.data)
		}
	})
	for i := range changed {
		q := &changed[i]
		p, r := m.peer(q.member), b.reading(q.member)
		if errors.Is(q.err, fs.ErrNotExist) { // removed since the list
			p.here = false
			continue
		}
		if q.err != nil {
			return fmt.Errorf("%s: %w", q.name, q.err)
		}
		r.version = q.version
		if q.damaged != nil { // The member will write it again, or be declared dead.
			m.log.Warn("the object of a member is damaged", "member", q.member, "error", q.damaged)
			continue
		}
		p.status, p.seenAt, r.written = q.status.status, now, q.status.written
	}
	for name, p := range m.peers {
		if _, listed := list[name]; !listed {
			p.here = false
		}
		if b.evictor != nil && !p.here && b.grantOf(name) == nil {
			delete(m.peers, name)
			delete(b.readings, name)
		}
	}
	return nil
}

func (b *bucket) reading(name string) *reading {
	r := b.readings[name]
	if r == nil {
		r = &reading{next: 1}
		b.readings[name] = r
	}
	return r
}

// request is a read of a member's status or log object.
type request struct {
	member, name string
	number       uint64
	version      string
	err          error

	data    []byte // until each has returned
	status  objectStatus
	damaged error // of decoding

	published int64
	records   []Record
}

// fetch makes the reads concurrently, each of at most most bytes, and calls decode for what was read.
func (b *bucket) fetch(list []request, most int64, decode func(q *request)) {
	b.parallel(len(list), func(i int) {
		q := &list[i]
		q.data, q.version, q.err = b.m.cfg.Objects.Get(q.name, "", most)
		decode(q)
		q.data = nil
	})
}

// parallel calls do for each number below n on several goroutines, and returns when all calls have returned.
func (b *bucket) parallel(n int, do func(i int)) {
	workers := min(b.m.cfg.Workers, n)
	if workers <= 1 {
		for i := range n {
			do(i)
		}
		return
	}
	var next atomic.Int64
	var work sync.WaitGroup
	for range workers {
		work.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				do(i)
			}
		})
	}
	work.Wait()
}

// tell writes this member's object if it has changed, or if the last write is a quarter of Lapse old.
func (b *bucket) tell(s *status, at time.Duration) (bool, error) {
	m := b.m
	next := objectStatus{written{b.logged, m.published, m.view.granted}, *s}
	if s.Free >= s.Want && b.told.Free >= b.told.Want { // Changes of Free and Want do not matter while the free credit covers the wish.
		next.Free, next.Want = b.told.Free, b.told.Want
	}
	next.Beat = b.told.Beat
	if m.admitted && reflect.DeepEqual(&next, &b.told) && at-b.toldAt < m.cfg.Lapse/4 {
		return false, nil
	}
	next.Beat = s.Beat
	data, err := EncodeControl(&next)
	if err != nil {
		return false, err
	}
	version, err := b.replace("hosts/"+m.name, data, b.version, func([]byte) bool { return true }) // the object has no other writer
	if errors.Is(err, errReplaced) {
		return false, ErrFenced
	} else if err != nil {
		return false, err
	}
	b.told, b.toldAt, b.version, *s = next, at, version, next.status
	return true, nil
}

// errReplaced means that another host has written the object, or that it is gone.
var errReplaced = errors.New("shared: the object was replaced or removed")

// replace writes an object over the version over. If the object has another version that own accepts, an earlier write of this
// host took effect without an answer, and replace writes over that version.
func (b *bucket) replace(name string, data []byte, over string, own func([]byte) bool) (version string, err error) {
	for range 2 {
		version, err = b.m.cfg.Objects.Put(name, data, over)
		if !errors.Is(err, fs.ErrExist) && !errors.Is(err, fs.ErrNotExist) {
			return version, err
		}
		now, other, gerr := b.m.cfg.Objects.Get(name, "", mostBatch)
		switch {
		case errors.Is(gerr, fs.ErrNotExist) || gerr == nil && !own(now):
			return "", errReplaced
		case gerr != nil:
			return "", gerr
		}
		over = other
	}
	return "", err
}

func batchName(n uint64) string { return "batch/" + strconv.FormatUint(n, 10) }

func (b *bucket) batch(n uint64) (forget string, victims []Victim, err error) {
	if forget = b.evictor.Batches[n].Forget; forget != "" {
		return forget, nil, nil
	}
	data, _, err := b.m.cfg.Objects.Get(batchName(n), "", mostBatch)
	if err == nil {
		victims, err = decodeVictims(data)
	}
	return "", victims, err
}

func (b *bucket) decision(n uint64) (decision, error) { return b.evictor.Batches[n].decision, nil }

// temp returns the name itself: a temporary is not visible to other hosts.
func (b *bucket) temp(name string, _ Credit) string { return name }

func (b *bucket) store(d *doubt) (made bool, err error) {
	files := b.m.cfg.FS
	if d.info, err = files.Stat(d.temp); err != nil {
		return false, err
	}
	err = files.RenameNoReplace(d.temp, d.target)
	if err == nil || errors.Is(err, unix.EAGAIN) {
		return err == nil, err
	}
	there, look := b.stored(d) // An earlier attempt may have taken the name.
	switch {
	case there:
		_ = files.Remove(d.temp) // frees its buffers
		return true, nil
	case look != nil || !errors.Is(err, fs.ErrExist):
		return false, errors.Join(fmt.Errorf("%w: %w", ErrDoubt, err), files.Remove(d.temp))
	}
	return false, err
}

// stored reports whether the object that was made of a temporary exists.
func (b *bucket) stored(d *doubt) (there bool, err error) {
	info, err := b.m.cfg.FS.Stat(d.target)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && info.Same(d.info), err
}

// happened looks for the object. If it has not appeared within landing, the publication counts as failed; an audit finds it if
// it appears later.
func (b *bucket) happened(d *doubt) (made, over bool, err error) {
	made, err = b.stored(d)
	return made, b.m.lastStep-d.since > b.m.cfg.landing(), err
}

// leave writes the end mark of the log, and removes the member's object.
func (b *bucket) leave(logged bool) (err error) {
	m := b.m
	if logged {
		_, err = m.cfg.Objects.Put(logObject(m.name, b.logged+1), end, "")
	}
	if m.term != nil {
		err = errors.Join(err, b.resign())
	}
	return errors.Join(err, m.cfg.Objects.Remove("hosts/"+m.name))
}
