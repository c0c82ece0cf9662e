package index

import (
	"bytes"
	"encoding/binary"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// nameTable is the names of a root's pieces, by the slots of their entries. A piece that is not in it has the built-in name.
// The zero value is empty. It is not safe for concurrent use.
type nameTable struct {
	heads []*[headSlots]uint32 // by slot: the first record's cell; nil: none of so many slots has one
	cells cells
	dirs  directories
}

const headSlots = 4096

// A record is a name: the next record's cell, the directory's number, the rank, the length of the file name's template,
// and the template.
const (
	recNext   = 0 // u32
	recDir    = 4 // u32
	recRank   = 8 // u8
	recLen    = 9 // u8
	recordTop = 10
)

// Add appends a name to those of an entry, given the entry's key. The path is a legal one.
func (t *nameTable) Add(slot uint32, key *kv.Key, n pieceformat.Name) {
	for uint32(len(t.heads)) <= slot/headSlots {
		t.heads = append(t.heads, nil)
	}
	block := &t.heads[slot/headSlots]
	if *block == nil {
		*block = new([headSlots]uint32)
	}
	var room [2 * pieceformat.MaxPath]byte
	d := digits(key)
	path := append(room[:0], n.Path...)
	cut := bytes.LastIndexByte(path, '/') + 1
	text, cursor := appendTemplate(path[len(path):], path[:cut], &d, 0)
	dir := t.dirs.hold(text)
	text, _ = appendTemplate(text[:0], path[cut:], &d, cursor)
	cell, rec := t.cells.alloc(recordTop + len(text))
	le := binary.LittleEndian
	le.PutUint32(rec[recNext:], 0)
	le.PutUint32(rec[recDir:], dir)
	rec[recRank], rec[recLen] = byte(n.Rank), byte(len(text))
	copy(rec[recordTop:], text)
	last := &(*block)[slot%headSlots]
	if *last == 0 {
		*last = cell
		return
	}
	for at := *last; ; {
		r := t.cells.at(at)
		next := le.Uint32(r[recNext:])
		if next == 0 {
			le.PutUint32(r[recNext:], cell)
			return
		}
		at = next
	}
}

func (t *nameTable) first(slot uint32) uint32 {
	if i := slot / headSlots; i < uint32(len(t.heads)) && t.heads[i] != nil {
		return t.heads[i][slot%headSlots]
	}
	return 0
}

// appendPath appends the path of an entry's piece, given the entry's key. ok is false when the piece has the built-in
// name.
func (t *nameTable) appendPath(dst []byte, slot uint32, key *kv.Key, rank uint32) (path []byte, ok bool) {
	for at := t.first(slot); at != 0; {
		r := t.cells.at(at)
		if uint32(r[recRank]) == rank {
			return t.expand(dst, r, key), true
		}
		at = binary.LittleEndian.Uint32(r[recNext:])
	}
	return dst, false
}

func (t *nameTable) expand(dst, rec []byte, key *kv.Key) []byte {
	dst, cursor := expand(dst, t.dirs.list[binary.LittleEndian.Uint32(rec[recDir:])].text, key, 0)
	dst, _ = expand(dst, rec[recordTop:recordTop+int(rec[recLen])], key, cursor)
	return dst
}

// List is the names of an entry, in the order in which they were added.
func (t *nameTable) List(slot uint32, key *kv.Key) (list []pieceformat.Name) {
	var room [pieceformat.MaxPath]byte
	for at := t.first(slot); at != 0; {
		r := t.cells.at(at)
		list = append(list, pieceformat.Name{Rank: uint32(r[recRank]), Path: string(t.expand(room[:0], r, key))})
		at = binary.LittleEndian.Uint32(r[recNext:])
	}
	return list
}

// Remove removes the names of an entry.
func (t *nameTable) Remove(slot uint32) {
	at := t.first(slot)
	if at == 0 {
		return
	}
	t.heads[slot/headSlots][slot%headSlots] = 0
	for at != 0 {
		r := t.cells.at(at)
		next := binary.LittleEndian.Uint32(r[recNext:])
		t.dirs.release(binary.LittleEndian.Uint32(r[recDir:]))
		t.cells.free(at, recordTop+int(r[recLen]))
		at = next
	}
}

// Memory is the bytes that the table takes.
func (t *nameTable) Memory() int64 {
	n := int64(cap(t.heads)) * 8
	for _, b := range t.heads {
		if b != nil {
			n += 4 * headSlots
		}
	}
	return n + int64(len(t.cells.chunks))*chunkBytes + t.dirs.memory()
}

// directories are texts by number, each with how many names have it.
type directories struct {
	list   []directory
	unused []uint32
	number map[string]uint32
	bytes  int64 // of all texts
}

type directory struct {
	text []byte
	held uint32
}

func (d *directories) hold(text []byte) uint32 {
	if n, ok := d.number[string(text)]; ok {
		d.list[n].held++
		return n
	}
	if d.number == nil {
		d.number = map[string]uint32{}
	}
	n := uint32(len(d.list))
	if free := len(d.unused); free > 0 {
		n, d.unused = d.unused[free-1], d.unused[:free-1]
	} else {
		d.list = append(d.list, directory{})
	}
	d.list[n] = directory{bytes.Clone(text), 1}
	d.number[string(text)] = n
	d.bytes += int64(len(text))
	return n
}

func (d *directories) release(n uint32) {
	e := &d.list[n]
	if e.held--; e.held > 0 {
		return
	}
	delete(d.number, string(e.text))
	d.bytes -= int64(len(e.text))
	*e = directory{}
	d.unused = append(d.unused, n)
}

func (d *directories) memory() int64 {
	return int64(cap(d.list))*32 + int64(cap(d.unused))*4 + int64(len(d.number))*48 + 2*d.bytes
}

// cells are pieces of memory of a multiple of 8 bytes, without pointers. Freed ones are used again for the same size.
type cells struct {
	chunks [][]byte
	used   int // bytes of the last chunk
	unused [cellClasses]uint32
}

const (
	cellUnit    = 8
	chunkBytes  = 1 << 16
	chunkCells  = chunkBytes / cellUnit
	cellClasses = (recordTop+255)/cellUnit + 2
)

// at is the memory from a cell to the end of its chunk.
func (c *cells) at(cell uint32) []byte {
	cell--
	return c.chunks[cell/chunkCells][cell%chunkCells*cellUnit:]
}

func (c *cells) alloc(bytes int) (cell uint32, memory []byte) {
	units := (bytes + cellUnit - 1) / cellUnit
	if cell = c.unused[units]; cell != 0 {
		m := c.at(cell)
		c.unused[units] = binary.LittleEndian.Uint32(m)
		return cell, m
	}
	if len(c.chunks) == 0 || c.used+units*cellUnit > chunkBytes {
		c.chunks, c.used = append(c.chunks, make([]byte, chunkBytes)), 0
	}
	cell = uint32((len(c.chunks)-1)*chunkCells + c.used/cellUnit + 1)
	c.used += units * cellUnit
	return cell, c.at(cell)
}

func (c *cells) free(cell uint32, bytes int) {
	units := (bytes + cellUnit - 1) / cellUnit
	binary.LittleEndian.PutUint32(c.at(cell), c.unused[units])
	c.unused[units] = cell
}
