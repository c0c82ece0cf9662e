package bucket

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/shared"
)

// A member's log is a sequence of objects. Each consists of a head, which holds the number of bytes that the member had
// published before it, and of records. A member that leaves writes end as its last object.

// end is the object that ends the log of a member that left cleanly: everything that the member published is logged.
var end = []byte("kvsend1\n")

func logName(member string, n uint64) string {
	return "log/" + member + "/" + strconv.FormatUint(n, 10)
}

func encodeLog(published int64, records []shared.Record) (b []byte, more int64) {
	b = shared.EncodeLogHead(published)
	for i := range records {
		b = records[i].Append(b)
		if records[i].Op == shared.Published {
			more += records[i].Bytes
		}
	}
	return b, more
}

func decodeLog(b []byte) (published int64, records []shared.Record, err error) {
	if published, err = shared.DecodeLogHead(b); err != nil {
		return 0, nil, err
	}
	for b = b[shared.LogHead:]; len(b) > 0; {
		r, n, err := shared.DecodeRecord(b)
		if err != nil {
			return 0, nil, err
		}
		if r.Op == shared.Published {
			published += r.Bytes
		}
		records, b = append(records, r), b[n:]
	}
	return published, records, nil
}

// followAll reads the new log objects of the other members.
func (m *Member) followAll() error {
	var list []request
	for _, name := range slices.Sorted(maps.Keys(m.peers)) {
		p := m.peers[name]
		last := p.Log
		if m.evictor != nil {
			if s := m.evictor.Grants[name]; s != nil && s.End > 0 {
				last = s.End - 1
			}
		}
		for n := p.next; n <= last && name != m.name && !p.past && len(list) < logsAtOnce; n++ {
			list = append(list, request{member: name, name: logName(name, n), number: n})
		}
	}
	m.fetch(list)
	for i := range list {
		if err := m.follow(&list[i]); err != nil {
			return err
		}
	}
	if m.evictor == nil {
		return nil
	}
	for name, s := range m.evictor.Grants {
		if p := m.peers[name]; s.End > 0 && name != m.name {
			if p == nil { // The member joined and left since the last step.
				m.peers[name] = &peer{next: 1}
			} else {
				p.ended = p.past || p.next >= s.End
			}
		}
	}
	return nil
}

// follow applies the records of one log object. The objects of one member are passed in order.
func (m *Member) follow(q *request) error {
	p := m.peers[q.member]
	switch {
	case q.number < p.next: // An earlier object was lost, and this one was skipped.
		return nil
	case q.err != nil && !errors.Is(q.err, fs.ErrNotExist):
		return q.err
	}
	published, records, err := decodeLog(q.data)
	if err != nil {
		if p.bad++; p.bad < mostBad && q.err == nil {
			return fmt.Errorf("%s: %w", q.name, err)
		}
		m.log.Warn("log lost before it was read; scanning the root again", "log", q.name, "error", errors.Join(q.err, err))
		p.next, p.published, p.bad = max(p.Log, q.number)+1, max(p.published, p.status.Published), 0
		m.ScanAgain()
		return nil
	}
	p.bad = 0
	for i := range records {
		m.Docket.Learn(&records[i])
	}
	p.next, p.published = q.number+1, published
	return nil
}

// mostBad is how many times a damaged log object or an unreadable batch is read before the member goes on without it.
const mostBad = 10

// attempt is a log object whose write has not been answered yet. It is written again unchanged, since others may have read it.
type attempt struct {
	data    []byte
	more    int64
	records []shared.Record
}

// keptLog is a log object that other members may still have to read.
type keptLog struct {
	number uint64
	at     time.Duration
}

// flush writes the records that are due as log objects, and removes objects that every live member has read.
func (m *Member) flush(now time.Duration) error {
	if !m.admitted {
		return nil
	}
	for range 2 { // The first round writes what failed before, the second what was added since.
		if m.retry == nil {
			records := m.Drain()
			if len(records) == 0 {
				break
			}
			a := &attempt{records: records}
			a.data, a.more = encodeLog(m.published, records)
			m.retry = a
		}
		name := logName(m.name, m.logged+1)
		_, err := m.cfg.Objects.Put(name, m.retry.data, "")
		if errors.Is(err, fs.ErrExist) {
			var there []byte
			if there, _, err = m.cfg.Objects.Get(name, ""); err == nil && !bytes.Equal(there, m.retry.data) {
				return shared.ErrFenced
			}
		}
		if err != nil {
			return err
		}
		m.logged++
		m.published += m.retry.more
		m.kept = append(m.kept, keptLog{m.logged, now})
		for i := range m.retry.records {
			if r := &m.retry.records[i]; r.Op == shared.Damaged {
				m.Docket.Learn(r)
			}
		}
		m.retry = nil
	}
	for len(m.kept) > 0 && now-m.kept[0].at > 2*m.cfg.Lapse { // Members that have not read it by now have been declared dead.
		if err := m.cfg.Objects.Remove(logName(m.name, m.kept[0].number)); err != nil {
			return err
		}
		m.kept = m.kept[1:]
	}
	return nil
}
