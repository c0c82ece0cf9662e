package index

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// nameTable holds names of pieces by the slot of their entry. A piece that is not in the table has the built-in name. The zero
// value is empty. It is not safe for concurrent use.
type nameTable struct {
	heads []*[headSlots]uint32 // cell of the first record by slot; a block is nil if none of its slots has a record
	cells cells
	dirs  directories
}

const headSlots = 4096

// Offsets in a record. A record is a name: the cell of the next record, the number of the directory, the rank, the length of
// the template of the file name, and the template.
const (
	recNext   = 0 // u32
	recDir    = 4 // u32
	recRank   = 8 // u8
	recLen    = 9 // u8
	recordTop = 10
)

// Add appends a name to the names of an entry. key is the entry's key. The path must be valid.
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

// appendPath appends the path of an entry's piece, given the entry's key. ok is false if the piece has the built-in name.
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

// List returns the names of an entry in the order in which they were added.
func (t *nameTable) List(slot uint32, key *kv.Key) (list []pieceformat.Name) {
	var room [pieceformat.MaxPath]byte
	for at := t.first(slot); at != 0; {
		r := t.cells.at(at)
		list = append(list, pieceformat.Name{Rank: uint32(r[recRank]), Path: string(t.expand(room[:0], r, key))})
		at = binary.LittleEndian.Uint32(r[recNext:])
	}
	return list
}

// Remove removes all names of an entry.
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

// Memory returns the size of the table in bytes.
func (t *nameTable) Memory() int64 {
	n := int64(cap(t.heads)) * 8
	for _, b := range t.heads {
		if b != nil {
			n += 4 * headSlots
		}
	}
	return n + int64(len(t.cells.chunks))*chunkBytes + t.dirs.memory()
}

// directories numbers the templates of directories. Each is counted by the names that use it.
type directories struct {
	list   []directory
	unused []uint32
	number map[string]uint32
	bytes  int64 // size of all texts
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

// cells allocates memory in multiples of 8 bytes, without pointers. Freed cells are reused for the same size.
type cells struct {
	chunks [][]byte
	used   int // bytes used in the last chunk
	unused [cellClasses]uint32
}

const (
	cellUnit    = 8
	chunkBytes  = 1 << 16
	chunkCells  = chunkBytes / cellUnit
	cellClasses = (recordTop+255)/cellUnit + 2
)

// at returns the memory from a cell to the end of its chunk.
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

// AddName adds a name of an entry's piece. It returns false if the piece already has it.
func (x *Index) AddName(slot uint32, n pieceformat.Name) bool {
	key, e := x.Key(slot), x.At(slot)
	if e.Is(Named) && slices.Contains(x.Names.List(slot, &key), n) {
		return false
	}
	x.Names.Add(slot, &key, n)
	e.Set(Named)
	return true
}

// HasName reports whether a present piece has a name. An empty path stands for the built-in name.
func (x *Index) HasName(slot, rank uint32, path string) bool {
	list := x.NamesOf(slot)
	if path != "" {
		return slices.Contains(list, pieceformat.Name{Rank: rank, Path: path})
	}
	_, named := pieceformat.NameOf(list, rank)
	return !named
}

// Rename replaces all names of a piece by one. An empty path stands for the built-in name.
func (x *Index) Rename(slot, rank uint32, path string) {
	list := x.NamesOf(slot)
	x.Names.Remove(slot)
	x.At(slot).Unset(Named)
	for _, n := range list {
		if n.Rank != rank {
			x.AddName(slot, n)
		}
	}
	if path != "" {
		x.AddName(slot, pieceformat.Name{Rank: rank, Path: path})
	}
}

// NameOf returns the name of a piece. It is empty for the built-in name.
func (x *Index) NameOf(slot, rank uint32) string {
	var room [pieceformat.MaxPath]byte
	key := x.Key(slot)
	path, _ := x.Names.appendPath(room[:0], slot, &key, rank)
	return string(path)
}

// NamesOf returns the names of an entry's pieces that are not built-in ones.
func (x *Index) NamesOf(slot uint32) []pieceformat.Name {
	if !x.At(slot).Is(Named) {
		return nil
	}
	key := x.Key(slot)
	return x.Names.List(slot, &key)
}

// Nearly every policy builds names from the hexadecimal digits of the key. The table therefore stores a name as a template: a
// run of such digits is one byte, with a value that no path can contain. As a result, the pieces of a namespace share a few
// directory templates, even if there are many directories on the disk, and the template of a file name takes a few bytes.
const (
	atCursor = 0x80 // | n-1: the n digits of the key that follow the last run
	atFirst  = 0xc0 // | n-1: the first n digits of the key
	mostRun  = 64
)

const digitText = "0123456789abcdef"

// digits returns the digits of a key in lower case.
func digits(key *kv.Key) (d [2 * kv.KeyBytes]byte) {
	for i, b := range key {
		d[2*i], d[2*i+1] = digitText[b>>4], digitText[b&15]
	}
	return d
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' }

// appendTemplate appends the template of a part of a path. cursor is the end of the last run in the digits of the key. The new
// cursor is returned for the next part. A single digit counts as a run only if it is a whole path component: elsewhere it is
// likely a coincidence.
func appendTemplate(dst, path []byte, key *[2 * kv.KeyBytes]byte, cursor int) ([]byte, int) {
	for i := 0; i < len(path); {
		n := 0
		for i+n < len(path) && isDigit(path[i+n]) {
			n++
		}
		run := path[i : i+n]
		alone := (i == 0 || path[i-1] == '/') && (i+n == len(path) || path[i+n] == '/')
		switch {
		case n == 0:
			dst = append(dst, path[i])
			n = 1
		case n > mostRun || n == 1 && !alone:
			dst = append(dst, run...)
		case cursor+n <= len(key) && string(run) == string(key[cursor:cursor+n]):
			dst = append(dst, byte(atCursor|(n-1)))
			cursor += n
		case string(run) == string(key[:n]):
			dst = append(dst, byte(atFirst|(n-1)))
			cursor = n
		default:
			dst = append(dst, run...)
		}
		i += n
	}
	return dst, cursor
}

// expand appends the text of a template.
func expand(dst, template []byte, key *kv.Key, cursor int) ([]byte, int) {
	for _, c := range template {
		if c < atCursor {
			dst = append(dst, c)
			continue
		}
		n := int(c&(mostRun-1)) + 1
		if c >= atFirst {
			cursor = 0
		}
		for range n {
			dst = append(dst, digitText[key[cursor/2]>>(4*(1-cursor%2))&15])
			cursor++
		}
	}
	return dst, cursor
}
