package pieceformat

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"
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
	TouchesFile    = MetaDir + "/touches"
	WrittenFile    = MetaDir + "/written" // hosts that share a root have WrittenFile.<host id>
)

// RootDirs are the directories that every root has.
var RootDirs = [...]string{
	"", NamespacesDir, PlansDir, QuarantineDir, CopyDir + "/namespaces", CopyDir + "/plans",
}

// RootFiles are the files that a root has once, or hosts that share it have once each.
var RootFiles = [...]string{CheckpointFile, StateFile, TouchesFile, WrittenFile}

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

// TempName is the name under which a file is written, beside its target: .<name>.<host id>.<seq>.tmp.
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
func ParseTemp(base string) (t Temp, ok bool) {
	rest, ok := strings.CutSuffix(base, ".tmp")
	if !ok || !strings.HasPrefix(base, ".") {
		return Temp{}, false
	}
	dot := strings.LastIndexByte(rest, '.')
	if dot <= 0 {
		return Temp{}, false
	}
	seq, err := strconv.ParseUint(rest[dot+1:], 16, 64)
	if err != nil {
		return Temp{}, false
	}
	rest = rest[:dot]
	dot = strings.LastIndexByte(rest, '.')
	if dot <= 0 || !ValidHostID(rest[dot+1:]) {
		return Temp{}, false
	}
	return Temp{rest[dot+1:], seq}, true
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
