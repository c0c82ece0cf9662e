package pieceformat

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
)

// Directories and files that a store keeps for itself, below a root.
const (
	MetaDir       = ".kvhost"
	CopyDir       = ".kvhost-copy"          // a second copy of what pieces cannot be understood without: see Copies
	NamespacesDir = MetaDir + "/namespaces" // texts, each named by its digest
	PlansDir      = MetaDir + "/plans"      // encoded plans, each named by its digest
	QuarantineDir = MetaDir + "/quarantine" // damaged files
	LockFile      = MetaDir + "/lock"       // hosts that share a root lock LockFile.<host id>

	// CheckpointFile lets the next start skip the scan. A program that changes a root while no host uses it must remove
	// this file first.
	CheckpointFile = MetaDir + "/index"
	StateFile      = MetaDir + "/policy"
	WrittenFile    = MetaDir + "/written" // hosts that share a root have WrittenFile.<host id>
	ProbeFile      = MetaDir + "/probe"   // of roots without directories, while one is tried
)

// RootDirs are the directories that every root has.
var RootDirs = [...]string{
	"", NamespacesDir, PlansDir, QuarantineDir, CopyDir + "/namespaces", CopyDir + "/plans",
}

// RootFiles are the files that a root has once, or hosts that share it have once each.
var RootFiles = [...]string{CheckpointFile, StateFile, WrittenFile}

// Copies are the directories that hold a file of a directory: the pieces of a namespace must not be lost with one file.
func Copies(dir string) []string {
	if dir == NamespacesDir || dir == PlansDir {
		return []string{dir, CopyDir + dir[len(MetaDir):]}
	}
	return []string{dir}
}

// maxName is the longest file name that file systems accept.
const maxName = 255

// ValidHostID says whether a host's id can be part of a file name.
func ValidHostID(id string) bool {
	if len(id) == 0 || len(id) > 32 {
		return false
	}
	for _, c := range []byte(id) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// TempName is the name under which a file is written, next to its target: .<name>.<host id>.<seq>.tmp.
func TempName(target, host string, seq uint64) string {
	dir, base := filepath.Split(target)
	tail := fmt.Sprintf(".%s.%x.tmp", host, seq)
	base = base[:min(len(base), maxName-1-len(tail))]
	return dir + "." + base + tail
}

// Temp is what the base name of a temporary says.
type Temp struct {
	Host string // that writes it, or wrote it
	Seq  uint64
}

// ParseTemp reads the base name of a temporary. It is false for the name of any other file.
func ParseTemp(base string) (Temp, bool) {
	t, _, ok := parseTemp(base)
	return t, ok
}

// parseTemp is ParseTemp, with the base name of the target, which may be cut short.
func parseTemp(base string) (t Temp, target string, ok bool) {
	rest, ok := strings.CutSuffix(base, ".tmp")
	if !ok || !strings.HasPrefix(base, ".") {
		return Temp{}, "", false
	}
	dot := strings.LastIndexByte(rest, '.')
	if dot <= 0 {
		return Temp{}, "", false
	}
	seq, err := strconv.ParseUint(rest[dot+1:], 16, 64)
	if err != nil {
		return Temp{}, "", false
	}
	rest = rest[:dot]
	dot = strings.LastIndexByte(rest, '.')
	if dot <= 0 || !ValidHostID(rest[dot+1:]) {
		return Temp{}, "", false
	}
	return Temp{rest[dot+1:], seq}, rest[1:dot], true
}

// Target is the name that a temporary was made for, unless that was cut short.
func Target(temp string) (target string, ok bool) {
	dir, base := filepath.Split(temp)
	_, target, ok = parseTemp(base)
	return dir + target, ok
}

// QuarantineName is the name, below a root, of a damaged file that a host keeps. Names sort by time.
func QuarantineName(stamp int64, seq uint64, base string) string {
	return quarantineName(fmt.Sprintf("%016x-%x-", stamp, seq), base)
}

// repairMark is in the names of files that a repair moved into quarantine, and in no other.
const repairMark = "-repair-"

// RepairName is the name, below a root, of a damaged file that a repair keeps. Names sort by time.
func RepairName(when time.Time, base string) string {
	return quarantineName(fmt.Sprintf("%016x%s", when.UnixNano(), repairMark), base)
}

// IsRepairName says whether a file in quarantine was moved there by a repair.
func IsRepairName(base string) bool { return strings.Contains(base, repairMark) }

func quarantineName(head, base string) string {
	return QuarantineDir + "/" + head + base[:min(len(base), maxName-len(head))]
}

// Name is one rank's file of an entry, where it has another name than the built-in one.
type Name struct {
	Rank uint32
	Path string // below the root
}

// MaxPath is the longest path of a name in bytes.
const MaxPath = policy.MaxPath

// CheckName returns an error for a path that no name can have: one that leads out of the root or to a hidden file, is too
// long, or holds bytes that some file system refuses.
func CheckName(path string) error { return policy.CheckPath([]byte(path)) }

// A list of names is encoded as, for each, its rank (1 byte), the path's length (2) and the path.
const listHead = 3

func AppendNames(b []byte, list []Name) []byte {
	for _, n := range list {
		b = append(b, byte(n.Rank))
		b = binary.LittleEndian.AppendUint16(b, uint16(len(n.Path)))
		b = append(b, n.Path...)
	}
	return b
}

// NamesBytes is how long an encoded list is.
func NamesBytes(list []Name) (n int) {
	for i := range list {
		n += listHead + len(list[i].Path)
	}
	return n
}

// DecodeNames decodes names, and refuses a list with a path that no name can have.
func DecodeNames(b []byte) (list []Name, err error) {
	for len(b) > 0 {
		if len(b) < listHead {
			return nil, fmt.Errorf("a list of names ends after %d bytes of a name", len(b))
		}
		rank, size := uint32(b[0]), int(binary.LittleEndian.Uint16(b[1:]))
		if b = b[listHead:]; rank >= kv.MaxRanks || size > len(b) {
			return nil, fmt.Errorf("a list of names has rank %d and a path of %d bytes in %d", rank, size, len(b))
		}
		if err := policy.CheckPath(b[:size]); err != nil {
			return nil, err
		}
		list = append(list, Name{rank, string(b[:size])})
		b = b[size:]
	}
	return list, nil
}

// NameOf is the path of a rank's name in a list; ok is false for a piece with the built-in name. A piece can have several
// names where hosts stored it at the same time: the first is the one to read.
func NameOf(list []Name, rank uint32) (path string, ok bool) {
	for i := range list {
		if list[i].Rank == rank {
			return list[i].Path, true
		}
	}
	return "", false
}

// The built-in name is <namespace digest>/<aa>/<b>/<key>_g<group>_r<rank>.kv: aa and b are the first digits of the key. It
// is what the place policy fanout answers without settings.
const (
	digestDigits = 2 * len(kv.Digest{})
	fanDigits    = len("/aa/b/")
	suffix       = ".kv"
)

// AppendBuiltin appends the built-in name of a piece. keyLen is the length of its namespace's keys in bytes.
func AppendBuiltin(dst []byte, namespace kv.Digest, keyLen uint32, key *kv.Key, group, rank uint32) []byte {
	const digits = "0123456789abcdef"
	dst = hex.AppendEncode(dst, namespace[:])
	dst = append(dst, '/', digits[key[0]>>4], digits[key[0]&15], '/', digits[key[1]>>4], '/')
	dst = hex.AppendEncode(dst, key[:keyLen])
	dst = append(dst, "_g"...)
	dst = strconv.AppendUint(dst, uint64(group), 10)
	dst = append(dst, "_r"...)
	dst = strconv.AppendUint(dst, uint64(rank), 10)
	return append(dst, suffix...)
}

// Reserved says whether no policy may give a path, because it would exclude a piece with its built-in name: it is
// the built-in name of a piece, leads through one, or is a directory on the way to some. Of a piece's own built-in name it
// says so, too.
func Reserved(path []byte) bool {
	var parts [4][]byte
	n := 0
	for rest, more := path, true; more && n < len(parts); n++ {
		parts[n], rest, more = bytes.Cut(rest, []byte("/"))
	}
	for i, digits := range [...]int{digestDigits, 2, 1} {
		if len(parts[i]) != digits || len(bytes.Trim(parts[i], "0123456789abcdef")) > 0 {
			return false
		}
		if n == i+1 {
			return true
		}
	}
	return IsBuiltin(path[:digestDigits+fanDigits+len(parts[3])])
}

// IsBuiltin says whether a path is the built-in name of some piece, whatever stands under it.
func IsBuiltin(path []byte) bool {
	_, _, ok := ParseBuiltin(path)
	return ok
}

// ParseBuiltin says of which piece a path is the built-in name. Of the header it fills namespace, group, key and rank.
func ParseBuiltin(path []byte) (h Header, keyLen uint32, ok bool) {
	if len(path) < digestDigits+fanDigits {
		return h, 0, false
	}
	if _, err := hex.Decode(h.Namespace[:], path[:digestDigits]); err != nil {
		return h, 0, false
	}
	rest, ok := bytes.CutSuffix(path[digestDigits+fanDigits:], []byte(suffix))
	text, rest, found := bytes.Cut(rest, []byte("_g"))
	group, rank, both := bytes.Cut(rest, []byte("_r"))
	if !ok || !found || !both || len(text) == 0 || len(text) > 2*kv.KeyBytes || len(text)%2 != 0 {
		return h, 0, false
	}
	n, err := hex.Decode(h.Key[:], text)
	g, gerr := strconv.ParseUint(string(group), 10, 32)
	r, rerr := strconv.ParseUint(string(rank), 10, 32)
	if err != nil || gerr != nil || rerr != nil {
		return h, 0, false
	}
	h.Group, h.Rank = uint32(g), uint32(r)
	// Only the one spelling that AppendBuiltin has.
	var room [2 * MaxPath]byte
	return h, uint32(n), bytes.Equal(path, AppendBuiltin(room[:0], h.Namespace, uint32(n), &h.Key, h.Group, h.Rank))
}

// KeyLen is the length of a namespace's keys in bytes, by the namespace's text.
func KeyLen(text string) uint32 {
	if n, err := strconv.Atoi(kv.Field(text, "key_bytes")); err == nil && n > 0 && n <= kv.KeyBytes {
		return uint32(n)
	}
	return kv.KeyBytes
}
