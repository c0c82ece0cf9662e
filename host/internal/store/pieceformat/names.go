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

// Names of the store's own directories and files below a root.
const (
	MetaDir       = ".kvhost"
	CopyDir       = ".kvhost-copy"          // second copy of the files without which pieces cannot be read: see Copies
	NamespacesDir = MetaDir + "/namespaces" // texts, named by their digests
	PlansDir      = MetaDir + "/plans"      // encoded plans, named by their digests
	QuarantineDir = MetaDir + "/quarantine" // damaged files
	LockFile      = MetaDir + "/lock"       // hosts that share a root use LockFile.<host id>

	// CheckpointFile lets the next start skip the scan. A program that changes a root while no host uses it must remove this
	// file first.
	CheckpointFile = MetaDir + "/index"
	StateFile      = MetaDir + "/policy"
	WrittenFile    = MetaDir + "/written" // hosts that share a root use WrittenFile.<host id>
	ProbeFile      = MetaDir + "/probe"   // written and removed by probes of roots without directories
)

// RootDirs are the directories that every root has.
var RootDirs = [...]string{
	"", NamespacesDir, PlansDir, QuarantineDir, CopyDir + "/namespaces", CopyDir + "/plans",
}

// RootFiles are files that exist once in a root, or once for each host in a shared root.
var RootFiles = [...]string{CheckpointFile, StateFile, WrittenFile}

// Copies returns the directories that hold a copy of each file in dir. Namespaces and plans have two copies, so that the loss
// of one file does not lose the pieces of a namespace.
func Copies(dir string) []string {
	if dir == NamespacesDir || dir == PlansDir {
		return []string{dir, CopyDir + dir[len(MetaDir):]}
	}
	return []string{dir}
}

// maxName is the longest file name that file systems accept, in bytes.
const maxName = 255

// ValidHostID reports whether a host's id can be part of a file name.
func ValidHostID(id string) bool {
	return len(id) > 0 && len(id) <= 32 && strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") == ""
}

// TempName returns the name under which a file is written before it is renamed to target: .<name>.<host id>.<seq>.tmp in the
// same directory.
func TempName(target, host string, seq uint64) string {
	dir, base := filepath.Split(target)
	tail := fmt.Sprintf(".%s.%x.tmp", host, seq)
	base = base[:min(len(base), maxName-1-len(tail))]
	return dir + "." + base + tail
}

// Temp is the information in the base name of a temporary file.
type Temp struct {
	Host string // id of the host that created it
	Seq  uint64
}

// ParseTemp parses the base name of a temporary file. It returns false for other names.
func ParseTemp(base string) (Temp, bool) {
	t, _, ok := parseTemp(base)
	return t, ok
}

// parseTemp is ParseTemp and also returns the base name of the target, which may be truncated.
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

// Target returns the name for which a temporary file was created. The name may be truncated if it is very long.
func Target(temp string) (target string, ok bool) {
	dir, base := filepath.Split(temp)
	_, target, ok = parseTemp(base)
	return dir + target, ok
}

// QuarantineName returns the name below a root under which a host keeps a damaged file. Names sort by time.
func QuarantineName(stamp int64, seq uint64, base string) string {
	return quarantineName(fmt.Sprintf("%016x-%x-", stamp, seq), base)
}

// repairMark appears only in the names of files that a repair moved into quarantine.
const repairMark = "-repair-"

// RepairName returns the name below a root under which a repair keeps a damaged file. Names sort by time.
func RepairName(when time.Time, base string) string {
	return quarantineName(fmt.Sprintf("%016x%s", when.UnixNano(), repairMark), base)
}

// IsRepairName reports whether a repair moved a file into quarantine.
func IsRepairName(base string) bool { return strings.Contains(base, repairMark) }

func quarantineName(head, base string) string {
	return QuarantineDir + "/" + head + base[:min(len(base), maxName-len(head))]
}

// Name is the name of one rank's piece of an entry, if it is not the built-in one.
type Name struct {
	Rank uint32
	Path string // path below the root
}

// MaxPath is the maximum number of bytes of a path.
const MaxPath = policy.MaxPath

// CheckName returns an error if no piece can have this path: it leads out of the root or to a hidden file, is too long, or
// contains bytes that some file systems refuse.
func CheckName(path string) error { return policy.CheckPath([]byte(path)) }

// listHead is the number of bytes before the path of an encoded name: the rank (1 byte) and the length of the path (2 bytes).
const listHead = 3

func AppendNames(b []byte, list []Name) []byte {
	for _, n := range list {
		b = append(b, byte(n.Rank))
		b = binary.LittleEndian.AppendUint16(b, uint16(len(n.Path)))
		b = append(b, n.Path...)
	}
	return b
}

// NamesBytes returns the length of an encoded list.
func NamesBytes(list []Name) (n int) {
	for i := range list {
		n += listHead + len(list[i].Path)
	}
	return n
}

// DecodeNames decodes a list of names. It refuses paths that no piece can have.
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

// NameOf returns the path of a rank in a list of names. ok is false if the piece has the built-in name. A piece can have
// several names if hosts stored it at the same time. The first one is to be read.
func NameOf(list []Name, rank uint32) (path string, ok bool) {
	for i := range list {
		if list[i].Rank == rank {
			return list[i].Path, true
		}
	}
	return "", false
}

// The built-in name of a piece is <namespace digest>/<aa>/<b>/<key>_g<group>_r<rank>.kv, where aa and b are the first digits of
// the key. The place policy fanout returns the same names if it has no settings.
const (
	digestDigits = 2 * len(kv.Digest{})
	fanDigits    = len("/aa/b/")
	suffix       = ".kv"
)

// AppendBuiltin appends the built-in name of a piece. keyLen is the length of the namespace's keys in bytes.
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

// Reserved reports whether a policy must not use a path, because a piece with a built-in name could not be created then. This
// is so if the path is the built-in name of a piece, leads through one, or is a directory of some. It holds for the built-in
// name of the piece itself, too.
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

// IsBuiltin reports whether a path is the built-in name of a piece.
func IsBuiltin(path []byte) bool {
	_, _, ok := ParseBuiltin(path)
	return ok
}

// ParseBuiltin parses a built-in name. It sets namespace, group, key and rank of the header.
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
	// Accept only the spelling of AppendBuiltin.
	var room [2 * MaxPath]byte
	return h, uint32(n), bytes.Equal(path, AppendBuiltin(room[:0], h.Namespace, uint32(n), &h.Key, h.Group, h.Rank))
}

// KeyLen returns the length of a namespace's keys in bytes, from the namespace's text.
func KeyLen(text string) uint32 {
	if n, err := strconv.Atoi(kv.Field(text, "key_bytes")); err == nil && n > 0 && n <= kv.KeyBytes {
		return uint32(n)
	}
	return kv.KeyBytes
}
