package s3fs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// lease is a lock: an object that its holder rewrites three times in a term. Another host may take the lock only after it has seen the
// object unchanged for a whole term. Clocks of different machines are never compared.
//
// A write of the object names the version that it replaces. So only one of two takers succeeds, and a holder that was paused learns of the
// loss at its next renewal. Until then it knows by its own clock that the lock has lapsed, and writes nothing. One case remains: the server
// may carry out late a request that began before the lock lapsed. Since objects of pieces are never replaced, the effect is limited to a
// piece that is in no account, or to a removed piece, which is a miss.
//
// If the server has no conditional writes, two hosts that start within settleTime of each other may both take the lock.
type lease struct {
	fs          *FS
	name, key   string
	id          uint64
	conditional bool
	who         holder

	stop, ended chan struct{}
	close       sync.Once

	mu      sync.Mutex
	etag    string
	renewed time.Time // start of the last successful renewal
	over    bool      // the lock was released, or another host has it
}

// holder is the content of a lock.
type holder struct {
	Holder  string        `json:"holder"`
	PID     int           `json:"pid"`
	Started string        `json:"started"` // start time of the process as the kernel reports it
	Kernel  string        `json:"kernel"`  // boot id of the kernel and PID name space; empty if unknown
	Term    time.Duration `json:"term_ns"`
	Renewal int           `json:"renewal"`
}

// settleTime is the time for which a new lock must stay unchanged if the server has no conditional writes.
const settleTime = 2 * time.Second

// longestTerm is the longest term that any host writes. An object with a longer term was not written by a host.
const longestTerm = 5 * time.Minute

// me returns the description of this process as a holder. It includes the kernel's boot id, because the first PID name space
// has the same number on every machine.
func (f *FS) me() holder {
	boot, _ := os.ReadFile(f.proc + "/sys/kernel/random/boot_id")
	space, _ := os.Readlink(f.proc + "/self/ns/pid")
	h := holder{Holder: f.cfg.Holder, PID: os.Getpid(), Term: f.cfg.Term}
	if start := strings.TrimSpace(string(boot)); start != "" && space != "" {
		h.Kernel = start + " " + space
	}
	h.Started = f.started(h.PID)
	return h
}

// started returns the start time of a process. It is empty if there is no such process or it is not visible.
func (f *FS) started(pid int) string {
	stat, _ := os.ReadFile(fmt.Sprintf("%s/%d/stat", f.proc, pid))
	_, rest, _ := strings.Cut(string(stat), ") ")
	if fields := strings.Fields(rest); len(fields) > 19 {
		return fields[19]
	}
	return ""
}

// hasEnded reports whether a holder was a process of this kernel that no longer exists. /proc may hide processes of other users. So the
// kernel is asked by sending signal 0, which reaches no process and distinguishes a missing process from a hidden one.
func (f *FS) hasEnded(h, me *holder) bool {
	if me.Kernel == "" || h.Kernel != me.Kernel || h.Started == "" || h.PID <= 0 {
		return false
	}
	now := f.started(h.PID)
	return now != "" && now != h.Started || unix.Kill(h.PID, 0) == unix.ESRCH
}

// Lock implements [staging.FS]. The lock of a file is a [lease]. The lock of a directory excludes other users in this process. If a lock
// was not released, Lock waits until it lapses, unless the holder was a process of this machine that has ended.
func (f *FS) Lock(name string) (io.Closer, error) {
	if f.isTop(name) {
		return f.lockDirectory(name)
	}
	l := &lease{fs: f, name: name, key: f.key(name), id: f.newNumber(), conditional: true, who: f.me(),
		stop: make(chan struct{}), ended: make(chan struct{})}
	old := f.lock(name)
	if old != nil && old.stands() {
		return nil, fmt.Errorf("%w: %s (process %d)", staging.ErrLocked, name, os.Getpid())
	}
	if err := l.take(old); err != nil {
		return nil, failed("lock", name, err, true)
	}
	f.mu.Lock()
	f.leases[name] = l
	f.mu.Unlock()
	if !f.cfg.Shared {
		f.abortEarlier()
	}
	go l.renew()
	return l, nil
}

// abortEarlier cancels the multipart uploads of hosts that had the lock before.
func (f *FS) abortEarlier() {
	count := 0
	err := f.uploads(f.prefix, func(key, upload string) {
		if err := f.free.abort(key, upload); err != nil {
			f.cfg.Log.Warn("a multipart upload of an earlier host is left", "key", key, "error", err)
			return
		}
		count++
	})
	if err != nil {
		f.cfg.Log.Warn("multipart uploads of earlier hosts cannot be listed; a lifecycle rule can end them", "error", err)
	} else if count > 0 {
		f.cfg.Log.Info("multipart uploads of earlier hosts were ended", "uploads", count)
	}
}

// take writes the lock if there is none or if its holder is gone.
func (l *lease) take(old *lease) error {
	for {
		text, v, err := l.read()
		when := condition{absent: true}
		switch {
		case err == nil:
			var other holder
			if json.Unmarshal(text, &other) != nil {
				other = holder{} // not the content of a lock, so its holder is unknown
			}
			ours := old != nil && v.id == old.id
			if !ours && !l.fs.hasEnded(&other, &l.who) {
				if err := l.lapse(&other, v.etag); err != nil {
					return err
				}
			}
			when = condition{etag: v.etag}
		case errnoOf(err, false) != unix.ENOENT:
			return err
		}
		switch err := l.write(when); {
		case isCode(err, http.StatusNotImplemented):
			return l.settle()
		case isCode(err, http.StatusPreconditionFailed), when.etag != "" && isCode(err, http.StatusNotFound): // another was faster
			continue
		case err != nil:
			return err
		}
		return l.tryServer()
	}
}

// lapse waits until the lock has been unchanged for its term. It fails if the lock changes.
func (l *lease) lapse(other *holder, etag string) error {
	term := l.who.Term
	if other.Term > 0 && other.Term <= longestTerm {
		term = max(term, other.Term)
	} else {
		l.fs.cfg.Log.Warn("the lock is none that a host has written", "key", l.key)
	}
	l.fs.cfg.Log.Info("the lock was not given back; waiting for it to lapse", "holder", other.Holder, "term", term)
	for end := time.Now().Add(term); time.Now().Before(end); {
		time.Sleep(term / 8)
		v, err := l.fs.free.head(l.key)
		switch {
		case isCode(err, http.StatusNotFound):
			return nil
		case err != nil:
			return err
		case v.etag != etag:
			return pathError("lock", l.name, fmt.Errorf("%w: by %s (process %d)", staging.ErrLocked, other.Holder, other.PID))
		}
	}
	return nil
}

func (l *lease) read() (text []byte, v version, err error) {
	text = make([]byte, 4096)
	n, v, err := l.fs.free.get(l.key, "", text, 0)
	if err != nil && errnoOf(err, false) == unix.ESTALE { // a request for a range of an empty object fails
		v, err = l.fs.free.head(l.key)
	}
	return text[:n], v, err
}

func (l *lease) write(when condition) error {
	began := time.Now()
	l.who.Renewal++
	text, err := json.Marshal(&l.who)
	if err != nil {
		return err
	}
	if !l.conditional {
		when = condition{}
	}
	etag, err := l.fs.free.put(l.key, l.id, text, when)
	if err == nil {
		l.mu.Lock()
		l.etag, l.renewed = etag, began
		l.mu.Unlock()
	}
	return err
}

// tryServer tests whether the server heeds the conditions of writes, with conditions that do not hold and with one that does. It also reads
// a part of an object, as loads do.
func (l *lease) tryServer() error {
	for _, wrong := range []condition{{absent: true}, {etag: "00000000000000000000000000000000"}} {
		switch err := l.write(wrong); {
		case err == nil, isCode(err, http.StatusNotImplemented):
			return l.settle()
		case !isCode(err, http.StatusPreconditionFailed):
			return err
		}
	}
	l.mu.Lock()
	etag := l.etag
	l.mu.Unlock()
	switch err := l.write(condition{etag: etag}); {
	case isCode(err, http.StatusPreconditionFailed):
		l.fs.cfg.Log.Warn("the server refuses a write whose condition holds, as behind a proxy that changes ETags", "etag", etag)
		return l.settle()
	case err != nil:
		return err
	}
	return l.fs.tryRange(l.key)
}

// settle takes the lock on a server without conditional writes.
func (l *lease) settle() error {
	if l.fs.cfg.Shared {
		return errors.Join(ErrConditions, l.fs.free.remove(l.key))
	}
	l.conditional = false
	l.fs.unconditional.Store(true)
	l.fs.cfg.Log.Warn("the server has no conditional writes: of two hosts that start at the same time both may take the root")
	if err := l.write(condition{}); err != nil {
		return err
	}
	time.Sleep(min(settleTime, l.who.Term/4))
	if v, err := l.fs.free.head(l.key); err != nil || v.id != l.id {
		return errors.Join(err, pathError("lock", l.name, fmt.Errorf("%w: by another, just now", staging.ErrLocked)))
	}
	return l.fs.tryRange(l.key)
}

// renew renews the lock until it is released or lost.
func (l *lease) renew() {
	defer close(l.ended)
	tick := time.NewTicker(l.who.Term / 3)
	defer tick.Stop()
	for {
		select {
		case <-l.stop:
			return
		case <-tick.C:
		}
		l.mu.Lock()
		etag := l.etag
		l.mu.Unlock()
		err := l.write(condition{etag: etag})
		if isCode(err, http.StatusPreconditionFailed) {
			if v, look := l.fs.free.head(l.key); look == nil && v.id == l.id { // a renewal without an answer took effect
				err = l.write(condition{etag: v.etag})
			}
		}
		if isCode(err, http.StatusPreconditionFailed) || isCode(err, http.StatusNotFound) {
			l.mu.Lock()
			l.over = true
			l.mu.Unlock()
			l.fs.cfg.Log.Error("another host has taken the lock, or removed it: nothing is written any more", "key", l.key)
			return
		}
		if err != nil && !errors.Is(err, context.Canceled) {
			l.fs.cfg.Log.Warn("the lock was not renewed", "error", err)
		}
	}
}

// stands reports whether no other host can have the lock.
func (l *lease) stands() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.over && time.Since(l.renewed) < l.who.Term*9/10
}

// stat describes the lock as a file. It returns an error for a lock that has lapsed, because its holder is unknown.
func (l *lease) stat() (staging.Info, error) {
	l.mu.Lock()
	lost := l.over
	v := version{size: 1, id: l.id, modified: l.renewed}
	l.mu.Unlock()
	switch {
	case lost:
		return staging.Info{}, pathError("stat", l.name, unix.ENOENT)
	case !l.stands():
		return staging.Info{}, failed("stat", l.name, ErrLapsed, false)
	}
	return l.fs.info(v), nil
}

func (l *lease) Close() (err error) {
	l.close.Do(func() {
		close(l.stop)
		if l.stands() {
			<-l.ended // otherwise a renewal could create the object again
			err = failed("unlock", l.name, l.fs.free.remove(l.key), true)
		}
		l.mu.Lock()
		l.over = true
		l.mu.Unlock()
		l.fs.mu.Lock()
		if l.fs.cfg.Shared && l.fs.leases[l.name] == l { // a released lock does not restrict writes
			delete(l.fs.leases, l.name)
		}
		l.fs.mu.Unlock()
	})
	return err
}

// lockDirectory locks the file system within this process.
func (f *FS) lockDirectory(name string) (io.Closer, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.own[name] {
		return nil, fmt.Errorf("%w: %s", staging.ErrLocked, name)
	}
	f.own[name] = true
	return directoryLock{f, name}, nil
}

// directoryLock is the lock on a directory.
type directoryLock struct {
	fs   *FS
	name string
}

func (l directoryLock) Close() error {
	l.fs.mu.Lock()
	defer l.fs.mu.Unlock()
	delete(l.fs.own, l.name)
	return nil
}
