package shared

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"time"
)

// A member's log in a bucket is a sequence of objects. Each consists of a head, which holds the number of bytes that the member
// had published before it, and of records. A member that leaves writes end as its last object.

// end is the object that ends the log of a member that left cleanly: everything that the member published is logged.
var end = []byte("kvsend1\n")

func logObject(member string, n uint64) string {
	return "log/" + member + "/" + strconv.FormatUint(n, 10)
}

func encodeLog(published int64, records []Record) []byte {
	b := encodeLogHead(published)
	for i := range records {
		b = records[i].Append(b)
	}
	return b
}

func decodeLog(b []byte) (published int64, records []Record, err error) {
	if published, err = decodeLogHead(b); err != nil {
		return 0, nil, err
	}
	for b = b[logHead:]; len(b) > 0; {
		r, n, err := DecodeRecord(b)
		if err != nil {
			return 0, nil, err
		}
		if r.Op == Published {
			published += r.Bytes
		}
		records, b = append(records, r), b[n:]
	}
	return published, records, nil
}

// follow reads the new log objects of the other members.
func (b *bucket) follow(each func(r *Record)) (all bool, err error) {
	if each == nil {
		b.skip()
		return true, nil
	}
	var list []request
	for _, name := range slices.Sorted(maps.Keys(b.m.peers)) {
		r := b.reading(name)
		last := r.Log
		if g := b.grantOf(name); g != nil && g.End > 0 {
			last = g.End - 1
		}
		for n := r.next; n <= last && name != b.m.name && !r.past && len(list) < logsAtOnce; n++ {
			list = append(list, request{member: name, name: logObject(name, n), number: n})
		}
	}
	for part := range slices.Chunk(list, logsInMemory) {
		b.fetch(part, mostLog, func(q *request) { q.published, q.records, q.damaged = decodeLog(q.data) })
		for i := range part {
			if err := b.read(&part[i], each); err != nil {
				return false, err
			}
			part[i] = request{} // its records would be kept until the last is read
		}
	}
	if b.evictor != nil {
		for name, g := range b.evictor.Grants {
			if g.End > 0 && name != b.m.name {
				r := b.reading(name)
				b.m.peer(name).ended = r.past || r.next >= g.End // false if the member joined and left since the last step
			}
		}
	}
	return true, nil
}

// skip notes where the logs end now.
func (b *bucket) skip() {
	for name, g := range b.evictor.Grants {
		p := b.m.peer(name)
		b.reading(name).past = !p.here || g.End > 0
	}
	for name, p := range b.m.peers {
		r := b.reading(name)
		r.next, p.published = r.Log+1, r.Published
	}
}

// mostBad is how many times a damaged log object is read before the member goes on without it.
const mostBad = 10

// read applies the records of one log object. The objects of one member are passed in order.
func (b *bucket) read(q *request, each func(r *Record)) error {
	m, p, r := b.m, b.m.peer(q.member), b.reading(q.member)
	switch {
	case q.number < r.next: // An earlier object was lost, and this one was skipped.
		return nil
	case q.err != nil && !errors.Is(q.err, fs.ErrNotExist):
		return q.err
	}
	if q.damaged != nil {
		if r.bad++; r.bad < mostBad && q.err == nil {
			return fmt.Errorf("%s: %w", q.name, q.damaged)
		}
		m.log.Warn("log lost before it was read; scanning the root again", "log", q.name, "error", errors.Join(q.err, q.damaged))
		r.next, p.published, r.bad = max(r.Log, q.number)+1, max(p.published, r.Published), 0
		m.scanAgain()
		return nil
	}
	r.bad = 0
	for i := range q.records {
		each(&q.records[i])
	}
	r.next, p.published = q.number+1, q.published
	return nil
}

// keptLog is a log object that other members may still have to read.
type keptLog struct {
	number uint64
	at     time.Duration
}

func (b *bucket) append(a *attempt, now time.Duration) error {
	m := b.m
	name, data := logObject(m.name, b.logged+1), encodeLog(m.published, a.records)
	_, err := m.cfg.Objects.Put(name, data, "")
	if errors.Is(err, fs.ErrExist) {
		var there []byte
		if there, _, err = m.cfg.Objects.Get(name, "", mostLog); err == nil && !bytes.Equal(there, data) {
			return ErrFenced
		}
	}
	if err == nil {
		b.logged++
		b.kept = append(b.kept, keptLog{b.logged, now})
	}
	return err
}

// tidy removes the log objects that every live member has read: those that have not read them by now were declared dead.
func (b *bucket) tidy(now time.Duration) error {
	for len(b.kept) > 0 && now-b.kept[0].at > 2*b.m.cfg.Lapse {
		if err := b.m.cfg.Objects.Remove(logObject(b.m.name, b.kept[0].number)); err != nil {
			return err
		}
		b.kept = b.kept[1:]
	}
	return nil
}
