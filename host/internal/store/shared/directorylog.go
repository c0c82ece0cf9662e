package shared

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/zeebo/xxh3"
)

// A member's log is a sequence of files. Each has a header with the number of bytes that the member had published before it,
// followed by records. Only the last logKept files are kept. A reader that falls further behind scans the root again.

const (
	logMagic    = "kvslog2\n"
	logHead     = 32 // bytes: magic, published u64, zero u64, xxh3-64 of the bytes before
	logKept     = 4
	logFull     = 1 << 20
	logReadPart = 1024 * recordBytes
)

func logName(dir string, n uint64) string { return fmt.Sprintf("%s/log.%d", dir, n) }

// EncodelogHead returns the head of a log file. published is the number of bytes published before it.
func encodeLogHead(published int64) []byte {
	b := make([]byte, logHead)
	copy(b, logMagic)
	binary.LittleEndian.PutUint64(b[8:], uint64(published))
	binary.LittleEndian.PutUint64(b[24:], xxh3.Hash(b[:24]))
	return b
}

func decodeLogHead(b []byte) (published int64, err error) {
	if len(b) < logHead || string(b[:8]) != logMagic || binary.LittleEndian.Uint64(b[24:]) != xxh3.Hash(b[:24]) {
		return 0, fmt.Errorf("%w: log header", ErrDamaged)
	}
	if published = int64(binary.LittleEndian.Uint64(b[8:])); published < 0 || published > mostTotal {
		return 0, fmt.Errorf("%w: log header: %d bytes published", ErrDamaged, published)
	}
	return published, nil
}

// writer appends to this member's log.
type writer struct {
	file uint64
	size int64 // 0 if the file does not exist yet
}

// append writes records to the log, which has published bytes so far, and begins a new file if the current one has reached limit
// bytes. A failed call can be repeated: it writes to the same offset.
func (w *writer) append(t *tree, dir string, limit, published int64, records []Record) error {
	if w.size >= limit {
		next := writer{file: w.file + 1}
		if w.file+1 >= logKept {
			if err := t.unlink(logName(dir, w.file+1-logKept)); err != nil {
				return err
			}
		}
		*w = next
	}
	var b []byte
	if w.size == 0 {
		b = encodeLogHead(published)
	}
	for i := range records {
		b = records[i].Append(b)
	}
	f, err := t.fs.OpenFile(logName(dir, w.file), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(b, w.size)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	w.size += int64(len(b))
	return nil
}

func (d *directory) append(a *attempt, _ time.Duration) error {
	if err := d.out.append(&d.tree, d.dir, d.m.cfg.LogBytes, d.m.published, a.records); err != nil {
		if missing(err) && d.absent(d.dir) {
			return ErrFenced
		}
		return err
	}
	d.temps = append(d.temps, a.temps...)
	return nil
}

// tidy removes the names of temporaries whose pieces are logged. A victim would survive its removal under such a name.
func (d *directory) tidy(time.Duration) error {
	for ; len(d.temps) > 0; d.temps = d.temps[1:] {
		if err := d.unlink(d.temps[0]); err != nil {
			return err
		}
	}
	return nil
}

// tail is a reader's position in another member's log.
type tail struct {
	file      uint64
	at        int64 // offset in the file; 0 before the header
	published int64 // total bytes published according to the records read
	lost      bool  // set if part of the log was removed before it was read
	given     bool  // set once a log that cannot be read is not waited for
}

// follow reads to the end of the log in dir and calls each for every record. It returns fs.ErrNotExist if the directory was
// renamed during the call; the end may then not have been reached.
func (l *tail) follow(t *tree, dir string, each func(r *Record)) error {
	for {
		err := l.readOn(t, logName(dir, l.file), each)
		if absent(err) {
			numbers, err := t.logs(dir)
			numbers = slices.DeleteFunc(numbers, func(n uint64) bool { return n < l.file })
			if err != nil || len(numbers) == 0 || slices.Min(numbers) == l.file {
				return err // The log is empty, or its first file is just being created.
			}
			*l = tail{file: slices.Min(numbers), published: l.published, lost: true}
			continue
		} else if err != nil {
			return err
		}
		next, err := t.exists(logName(dir, l.file+1))
		if err != nil {
			return err
		}
		if !next {
			_, err := t.fs.Stat(dir)
			return err
		}
		// Records may have been appended between the last read and the creation of the next file.
		if err := l.readOn(t, logName(dir, l.file), each); err != nil && !absent(err) {
			return err
		}
		*l = tail{file: l.file + 1, published: l.published, lost: l.lost}
	}
}

// logs lists the numbers of the log's files in dir.
func (t *tree) logs(dir string) (numbers []uint64, err error) {
	entries, err := t.fs.ReadDir(dir)
	for _, e := range entries {
		var k uint64
		name := e.Name()
		if _, serr := fmt.Sscanf(name, "log.%d", &k); serr == nil && name == fmt.Sprintf("log.%d", k) {
			numbers = append(numbers, k)
		}
	}
	return numbers, err
}

func (l *tail) readOn(t *tree, name string, each func(r *Record)) error {
	f, err := t.fs.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if l.at == 0 {
		var head [logHead]byte
		if n, err := f.ReadAt(head[:], 0); n < logHead {
			if err == io.EOF {
				return nil // the header is being written
			}
			return err
		}
		published, err := decodeLogHead(head[:])
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		l.at, l.published = logHead, published
	}
	if t.part == nil {
		t.part = make([]byte, logReadPart)
	}
	for {
		n, err := f.ReadAt(t.part, l.at)
		if err != nil && err != io.EOF {
			return err
		}
		full := n == len(t.part)
		for b := t.part[:n]; len(b) > 0; {
			r, size, err := DecodeRecord(b)
			if full && len(b) < size && len(b) < len(t.part) {
				break // The record is cut off by the end of the part. The next part begins with it.
			}
			if err != nil {
				return nil // The record is being written. It is read again at the next step.
			}
			b, l.at = b[size:], l.at+int64(size)
			if r.Op == Published {
				l.published += r.Bytes
			}
			each(&r)
		}
		if !full {
			return nil
		}
	}
}

// follow reads the logs of all other members, including those that are gone.
func (d *directory) follow(each func(r *Record)) (all bool, err error) {
	m := d.m
	if each == nil {
		each = func(*Record) {}
	}
	all = true
	for i, name := range slices.Concat(d.live, d.dead) {
		p, dir := m.peer(name), d.hosts()+"/"+name
		if i >= len(d.live) {
			dir = d.gone() + "/" + name
		} else if !p.here {
			continue // It was moved to gone during the list.
		}
		if name == m.name {
			continue
		}
		t := d.tails[name]
		if t == nil {
			t = &tail{}
			d.tails[name] = t
		}
		err := t.follow(&d.tree, dir, each)
		switch {
		case missing(err): // renamed or removed
			all = false
		case errors.Is(err, ErrDamaged), odd(err):
			m.log.Warn("cannot read a log", "error", err)
			if i >= len(d.live) { // it cannot grow any more: a scan finds what it should have said
				t.lost, t.given, p.ended = !t.given, true, true
			}
		case err != nil:
			return false, err
		default:
			p.ended = i >= len(d.live)
		}
		p.published = t.published
		if t.lost {
			t.lost = false
			if m.admitted {
				m.log.Warn("log lost before it was read; scanning the root again", "log", name)
				m.scanAgain()
			}
		}
	}
	return all, nil
}
