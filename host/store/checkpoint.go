package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/bits"
	"os"

	"github.com/zeebo/xxh3"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/staging"
)

// A checkpoint is a root's index as it was when the store was closed in order. The next start takes it instead of a scan,
// each entry in its old slot, so that what the evict policy kept of itself is right too.
//
// It is written only when the account is exact: nothing in flight, nothing leaving, no stray, the scan at the start
// finished, the root in use and not shared. And only when all that led to it is on disk: after a power failure names of
// files that were unlinked would come back, and be in nobody's account. The next start removes it, durably, before it changes anything. So it is
// there only if nobody has used the root since; after a crash there is none, and the scan rebuilds the index. What
// another program has changed meanwhile shows where it always does: a load compares header and checksums, and a file that
// is gone takes its entry with it. Names follow from the place policy, so a checkpoint holds only under the same one; and
// some files are looked at before the rest is believed.
//
// Little-endian: a head of 64 bytes; the owners, 64 bytes each; the entries by slot.
const (
	checkpointFile  = metaDir + "/index"
	checkpointMagic = "kvindex1"
	checkpointHead  = 64
	ownerRecord     = 64
	entryRecord     = 28 // and 16 or 32 of key, and what flags say
	checkpointPart  = 1 << 20
	lookedAt        = 64 // files
)

// Flags of an entry's record, beside its state bits.
const (
	recLong = 1 << iota // a key of 32 bytes
	recWide             // a set of ranks of 8 bytes, not of one
	recOwed             // 8 bytes: ranks that bytes are reserved for and that are not there
	recEnds             // 4 bytes: when it expires
)

// checkpoint is the head.
type checkpoint struct {
	when    int64 // a store time: later ones are greater
	high    uint32
	clock   uint32
	entries uint32
	owners  uint32
	body    uint64 // xxh3-64 of what follows
}

func (c *checkpoint) encode() []byte {
	le, b := binary.LittleEndian, make([]byte, 0, checkpointHead)
	b = append(b, checkpointMagic...)
	b = le.AppendUint64(b, uint64(c.when))
	b = le.AppendUint32(b, c.high)
	b = le.AppendUint32(b, c.clock)
	b = le.AppendUint32(b, c.entries)
	b = le.AppendUint32(b, c.owners)
	b = append(b, make([]byte, 16)...)
	b = le.AppendUint64(b, c.body)
	return le.AppendUint64(b, xxh3.Hash(b))
}

func decodeCheckpoint(b []byte) (c checkpoint, err error) {
	le := binary.LittleEndian
	if len(b) < checkpointHead || string(b[:8]) != checkpointMagic || le.Uint64(b[56:]) != xxh3.Hash(b[:56]) {
		return c, fmt.Errorf("%w: not a checkpoint of this version", ErrDamaged)
	}
	return checkpoint{
		when: int64(le.Uint64(b[8:])), high: le.Uint32(b[16:]), clock: le.Uint32(b[20:]), entries: le.Uint32(b[24:]),
		owners: le.Uint32(b[28:]), body: le.Uint64(b[48:]),
	}, nil
}

// appendEntry appends an entry's record.
func (x *index) appendEntry(b []byte, slot uint32, ends *expiries) []byte {
	le, e, k := binary.LittleEndian, x.at(slot), x.key(slot)
	set, owed, flags := x.pieces(slot), x.owed[slot], byte(0)
	if [keyTail]byte(k[keyHead:]) != [keyTail]byte{} {
		flags |= recLong
	}
	if set > 0xff {
		flags |= recWide
	}
	if owed != 0 {
		flags |= recOwed
	}
	end := ends.at(slot)
	if end != 0 {
		flags |= recEnds
	}
	b = le.AppendUint32(b, slot)
	b = append(b, flags, e.what[0]&(stComplete|stDetour|stUnproven))
	b = append(b, e.what[1:]...)
	b = append(b, e.parent[:]...)
	b = append(b, e.tick[:]...)
	b = le.AppendUint32(b, x.units(slot))
	b = le.AppendUint16(b, e.deep)
	b = append(b, byte(set))
	b = append(b, k[:keyHead]...)
	if flags&recLong != 0 {
		b = append(b, k[keyHead:]...)
	}
	if flags&recWide != 0 {
		b = le.AppendUint64(b, set)
	}
	if flags&recOwed != 0 {
		b = le.AppendUint64(b, owed)
	}
	if end != 0 {
		b = le.AppendUint32(b, end)
	}
	return b
}

// enterRecord enters what appendEntry wrote, in its old slot, and returns how long the record is; 0 when b is only a part of
// it. Slots come in order. owners translates the numbers of that time.
func (x *index) enterRecord(b []byte, owners []uint32, ends *expiries) (n int, err error) {
	if len(b) < entryRecord+keyHead {
		return 0, nil
	}
	le, flags := binary.LittleEndian, b[4]
	n = entryRecord + keyHead
	for i, size := range [...]int{keyTail, 8, 8, 4} {
		if flags>>i&1 != 0 {
			n += size
		}
	}
	if len(b) < n {
		return 0, nil
	}
	slot := le.Uint32(b)
	who := uint32(b[6]) | uint32(b[7])<<8 | uint32(b[8])<<16
	if slot >= x.max || slot < x.high || flags > recLong|recWide|recOwed|recEnds || int(who) >= len(owners) || owners[who] == none {
		return n, fmt.Errorf("%w: slot %d of owner %d after slot %d", ErrDamaged, slot, who, x.high)
	}
	var k chunk.Key
	rest := b[entryRecord+copy(k[:], b[entryRecord:entryRecord+keyHead]):]
	if flags&recLong != 0 {
		rest = rest[copy(k[keyHead:], rest[:keyTail]):]
	}
	set := uint64(b[27])
	if flags&recWide != 0 {
		set, rest = le.Uint64(rest), rest[8:]
	}
	o := x.owners.list[owners[who]]
	if k == chunk.Root {
		return n, fmt.Errorf("%w: slot %d without a key", ErrDamaged, slot)
	}
	x.takeAt(slot, &k)
	e := x.at(slot)
	e.setOwner(owners[who])
	e.set(stLive | b[5]&(stComplete|stDetour|stUnproven))
	copy(e.parent[:], b[9:])
	copy(e.tick[:], b[17:])
	e.deep = le.Uint16(b[25:])
	if !x.insert(x.hash(o.class, k), slot) {
		return n, fmt.Errorf("%w: more keys nearly equal than the index takes", ErrDamaged)
	}
	x.join(slot)
	x.setUnits(slot, le.Uint32(b[21:]))
	x.setPieces(slot, set)
	if flags&recOwed != 0 {
		x.owe(slot, le.Uint64(rest))
		rest = rest[8:]
	}
	if flags&recEnds != 0 {
		ends.set(slot, int64(le.Uint32(rest)))
	}
	return n, nil
}

// unsettled says why the account is not exact, if it is not. mu is held.
func (r *root) unsettled() string {
	switch {
	case r.cfg.Shared:
		return "the root is shared"
	case r.scanning:
		return "the scan at the start has not ended"
	case len(r.flights) > 0:
		return "entries are in flight"
	case r.stray != 0:
		return "files would not go"
	case !r.serving():
		return "the root is out"
	}
	return ""
}

// saveCheckpoint writes the index, and what the evict policy keeps of itself, when the account is exact. Nothing else uses
// the root any more.
func (r *root) saveCheckpoint() {
	r.mu.Lock()
	defer r.mu.Unlock()
	why := r.unsettled()
	r.x.each(func(_ uint32, e *entry) {
		if e.any(stLeaving | stDetached) {
			why = "entries are leaving"
		}
	})
	if why != "" {
		r.log.Info("no checkpoint is written; the next start scans", "because", why)
		return
	}
	c := checkpoint{when: r.store.stamp(), high: r.x.high, clock: r.x.clock, entries: r.x.used, owners: uint32(len(r.x.owners.list))}
	err := r.fs.SyncFS(r.dir)
	if err == nil {
		err = r.saveState(c.when)
	}
	if err == nil {
		err = r.replaceMeta(checkpointFile, func(f staging.File) error { return r.x.writeCheckpoint(f, c, r.ownerRecords(), &r.expiries) })
	}
	if err != nil {
		r.log.Warn("the checkpoint could not be written; the next start scans", "error", err)
	}
}

// replaceMeta writes one of the store's own files, durably.
func (r *root) replaceMeta(file string, write func(staging.File) error) error {
	name := r.dir + "/" + file
	temp := tempName(name, r.store.cfg.HostID, r.store.seq.Add(1))
	f, err := r.fs.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err = write(f); err == nil {
		err = f.Datasync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = r.fs.Rename(temp, name)
	}
	if err != nil {
		_ = r.fs.Remove(temp)
		return err
	}
	return r.fs.SyncDir(r.dir + "/" + metaDir)
}

// ownerRecords are the owners in the words of the next run: namespace, group, tenant, time to live, naming. One that has no
// entries any more is all zero.
func (r *root) ownerRecords() []byte {
	has := make([]bool, len(r.x.owners.list))
	r.x.each(func(_ uint32, e *entry) { has[e.owner()] = true })
	b := make([]byte, 0, len(r.x.owners.list)*ownerRecord)
	for i, o := range r.x.owners.list {
		var rec [ownerRecord]byte
		if !has[i] {
			b = append(b, rec[:]...)
			continue
		}
		c := r.store.spaces.class(o.class)
		copy(rec[:16], c.ns.digest[:])
		binary.LittleEndian.PutUint32(rec[16:], c.group)
		binary.LittleEndian.PutUint32(rec[20:], r.store.spaces.tenantOf(o.tenant))
		binary.LittleEndian.PutUint64(rec[24:], uint64(c.ns.ttl))
		copy(rec[32:], c.names.identity())
		b = append(b, rec[:]...)
	}
	return b
}

func (x *index) writeCheckpoint(w io.WriterAt, c checkpoint, owners []byte, ends *expiries) error {
	sum, at, part := xxh3.New(), int64(checkpointHead), owners
	flush := func(most int) error {
		if len(part) <= most {
			return nil
		}
		_, _ = sum.Write(part)
		_, err := w.WriteAt(part, at)
		at += int64(len(part))
		part = part[:0]
		return err
	}
	for slot := range x.high {
		if x.at(slot).is(stLive) {
			part = x.appendEntry(part, slot, ends)
		}
		if err := flush(checkpointPart); err != nil {
			return err
		}
	}
	if err := flush(0); err != nil {
		return err
	}
	c.body = sum.Sum64()
	_, err := w.WriteAt(c.encode(), 0)
	return err
}

// takeCheckpoint reads the checkpoint into the index, if there is one to go by, and removes it. An error says that it could
// not be removed.
func (r *root) takeCheckpoint() (*checkpoint, error) {
	name := r.dir + "/" + checkpointFile
	f, err := r.fs.OpenFile(name, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	x := newIndex(r.cfg.MaxEntries, r.store.spaces.print, r.store.spaces.base)
	var c checkpoint
	var ends expiries
	if err == nil {
		c, err = r.readCheckpoint(x, f, &ends)
		err = errors.Join(err, f.Close())
	}
	if err == nil {
		err = r.lookAt(x)
	}
	if gone := r.removeCheckpoint(); gone != nil {
		return nil, gone
	}
	if err != nil {
		r.log.Warn("the checkpoint is not used; the root is scanned", "error", err)
		return nil, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.x, r.expiries = x, ends
	x.each(func(slot uint32, e *entry) {
		r.classOf(slot).refs.Add(1)
		r.used += x.bytes(slot)
		r.bill(slot, x.bytes(slot))
		if e.is(stComplete) {
			r.complete++
		}
		r.count.recovered += uint64(bits.OnesCount64(x.pieces(slot)))
		if !r.proven {
			e.set(stUnproven)
		}
	})
	r.store.stampsFrom(c.when)
	return &c, nil
}

// removeCheckpoint does so durably, before anything changes that it tells of.
func (r *root) removeCheckpoint() error {
	err := r.fs.Remove(r.dir + "/" + checkpointFile)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = r.fs.SyncDir(r.dir + "/" + metaDir)
	}
	if err != nil {
		return fmt.Errorf("store: root %s: a checkpoint that must go: %w", r.dir, err)
	}
	return nil
}

func (r *root) readCheckpoint(x *index, f staging.File, ends *expiries) (checkpoint, error) {
	info, err := f.Stat()
	if err != nil {
		return checkpoint{}, err
	}
	return x.readCheckpoint(f, info.Size, ends, r.store.ownerFor)
}

// ownerFor finds the owner that a record names.
func (s *Store) ownerFor(rec []byte) (owner, error) {
	cl, err := s.classFor(&Header{Namespace: chunk.Digest(rec[:16]), Group: binary.LittleEndian.Uint32(rec[16:])})
	if err != nil {
		return owner{}, err
	}
	if string(cl.names.identity()) != string(rec[32:ownerRecord]) {
		if cl, err = s.classNamed(cl, rec[32:ownerRecord]); err != nil {
			return owner{}, err
		}
	}
	if cl == nil || binary.LittleEndian.Uint64(rec[24:]) != uint64(cl.ns.ttl) {
		return owner{}, fmt.Errorf("%w: namespace %x has another place policy or time to live now", ErrDamaged, rec[:16])
	}
	tenant, err := s.spaces.internTenant(binary.LittleEndian.Uint32(rec[20:]))
	return owner{cl.id, tenant}, err
}

// readCheckpoint fills an empty index. After an error it is of no use.
func (x *index) readCheckpoint(f io.ReaderAt, size int64, ends *expiries, ownerFor func([]byte) (owner, error)) (checkpoint, error) {
	head := make([]byte, min(size, checkpointHead))
	if _, err := f.ReadAt(head, 0); err != nil && err != io.EOF {
		return checkpoint{}, err
	}
	c, err := decodeCheckpoint(head)
	switch {
	case err != nil:
		return c, err
	case c.high > x.max:
		return c, fmt.Errorf("%w: %d slots, the root has %d now", ErrDamaged, c.high, x.max)
	case size < checkpointHead+int64(c.owners)*ownerRecord+int64(c.entries)*(entryRecord+keyHead) || c.owners > maxOwners || c.entries > c.high:
		return c, fmt.Errorf("%w: a checkpoint of %d entries in %d bytes", ErrDamaged, c.entries, size)
	}
	x.reserve(int(c.entries))
	x.kin.reserve(int(c.entries))
	sum, buf, at := xxh3.New(), make([]byte, 0, checkpointPart+entryRecord+64), int64(checkpointHead)
	owners := make([]uint32, 0, c.owners)
	for at < size || len(buf) > 0 {
		n := min(size-at, int64(checkpointPart))
		fresh := buf[len(buf) : len(buf)+int(n)]
		if _, err := f.ReadAt(fresh, at); err != nil && err != io.EOF {
			return c, err
		}
		_, _ = sum.Write(fresh)
		at += n
		left := buf[:len(buf)+int(n)]
		for len(owners) < cap(owners) && len(left) >= ownerRecord {
			id := none
			if rec := left[:ownerRecord]; [ownerRecord]byte(rec) != [ownerRecord]byte{} {
				o, err := ownerFor(rec)
				if err != nil {
					return c, err
				}
				id, _ = x.owners.intern(o)
			}
			owners, left = append(owners, id), left[ownerRecord:]
		}
		for len(owners) == int(c.owners) && len(left) > 0 {
			n, err := x.enterRecord(left, owners, ends)
			if err != nil {
				return c, err
			}
			if n == 0 {
				break
			}
			left = left[n:]
		}
		if n == 0 && len(left) > 0 {
			return c, fmt.Errorf("%w: the checkpoint ends within an entry", ErrDamaged)
		}
		buf = append(buf[:0], left...)
	}
	if sum.Sum64() != c.body || x.used != c.entries || x.high > c.high {
		return c, fmt.Errorf("%w: the checkpoint has %d entries and checksum %016x, it says %d and %016x", ErrDamaged, x.used, sum.Sum64(), c.entries, c.body)
	}
	x.clock = c.clock
	x.fillGaps(c.high)
	return c, nil
}

// lookAt compares some entries of a checkpoint with their files.
func (r *root) lookAt(x *index) error {
	n := max(1, x.high/lookedAt)
	for slot := n - 1; slot < x.high; slot += n {
		e := x.at(slot)
		if !e.is(stLive) || e.is(stDetour) || x.owed[slot] != 0 {
			continue
		}
		k, sum := x.key(slot), int64(0)
		for rank := range uint32(chunk.MaxRanks) {
			if x.pieces(slot)&(1<<rank) == 0 {
				continue
			}
			name, err := r.path(r.store.spaces.class(x.ownerOf(slot).class), &k, rank, false)
			if err != nil {
				return err
			}
			info, err := r.fs.Stat(name)
			if err != nil {
				return err
			}
			sum += padded(info.Allocated)
		}
		if sum != x.bytes(slot) {
			return fmt.Errorf("%w: %s takes %d bytes, the checkpoint says %d", ErrDamaged, k, sum, x.bytes(slot))
		}
	}
	return nil
}
