package shared

import (
	"errors"
	"io"
	"maps"
	"math"
	"os"
	"slices"

	"github.com/kvhost/kvhost/staging"
)

// sweep removes the temporaries of a member that is gone and logs those that were published. It may be repeated. One
// that cannot be removed, as where a network file system keeps it for a process that has it open, keeps the member's
// credit; the others do not wait for it.
func (t *term) sweep(dir string) error {
	m := t.m
	entries, err := m.fs.ReadDir(dir + "/t")
	if absent(err) {
		return nil
	} else if err != nil {
		return err
	}
	a := &attempt{}
	var failed []error
	for _, e := range entries {
		name := dir + "/t/" + e.Name()
		info, err := m.fs.Stat(name)
		switch base := e.Name(); {
		case err != nil:
		case info.Links > 1 && base != probe && base != probed:
			err = t.relay(a, name, info)
		default:
			err = m.discard(name)
		}
		failed = append(failed, ignoreMissing(err))
	}
	if len(a.records) > 0 {
		for i := range a.records {
			m.learn(&a.records[i])
		}
		if err := a.record(m); err != nil {
			return err
		}
		if err := a.clear(m); err != nil {
			return err
		}
	}
	if err := errors.Join(failed...); err != nil {
		return err
	}
	return m.remove(dir + "/t")
}

// seal ends the logs of members that are gone, before anything is decided without them: what such a host appends to a file
// that it has open would tell the others of victims that are long removed. Its last file is replaced by a copy. What the
// copy lacks is among the temporaries.
func (t *term) seal() error {
	for _, name := range slices.Sorted(maps.Keys(t.peers)) {
		p, dir := t.peers[name], t.m.gone()+"/"+name
		if !p.gone || p.sealed {
			continue
		}
		numbers, err := t.m.logs(dir)
		if err == nil && len(numbers) > 0 {
			last, copied := logName(dir, slices.Max(numbers)), t.dir+"/log.new"
			if err = t.m.copy(last, copied); err == nil {
				err = t.m.fs.Rename(copied, last)
			}
		}
		if err != nil && !absent(err) {
			return err
		}
		p.sealed = true
	}
	return nil
}

// relay adds a temporary that was published to what this member logs.
func (t *term) relay(a *attempt, name string, info staging.Info) error {
	r, err := t.m.back.Identify(name, info)
	if err == nil {
		r.Op = Relayed
		a.records, a.temps = append(a.records, r), append(a.temps, name)
		return nil
	}
	if !errors.Is(err, ErrDamaged) {
		return err
	}
	// Nobody can tell the others what to count. Under its other name it takes nothing from now on, and is damaged as before.
	t.m.log.Warn("published temporary is damaged; its piece was emptied", "file", name, "error", err)
	return t.m.discard(name)
}

// discard frees what a temporary takes, and removes it. Its writer may be paused for long and have it open, and has
// credit for it no more.
func (t *tree) discard(name string) error {
	f, err := t.fs.OpenFile(name, os.O_WRONLY|os.O_TRUNC, 0)
	if err == nil {
		err = f.Close()
	}
	if err == nil {
		err = t.remove(name)
	}
	return err
}

// copy writes the bytes of a log to another file.
func (t *tree) copy(from, to string) error {
	r, err := t.fs.OpenFile(from, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := t.fs.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.NewOffsetWriter(w, 0), io.NewSectionReader(r, 0, math.MaxInt64))
	return errors.Join(err, w.Close())
}

// scanAgain asks for another scan of the root.
func (m *Member) scanAgain() { m.ticket.Store(max(1, m.cfg.Unique())) }
