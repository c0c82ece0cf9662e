package staging

import "strings"

// Op names operations of [FS] and [File]. Ops are bits: a value can name several.
type Op uint32

// The operations.
const (
	OpOpen Op = 1 << iota
	OpDirect
	OpRead
	OpWrite
	OpSync
	OpAllocate
	OpClose
	OpRename
	OpPublish
	OpLink
	OpRemove
	OpMkdir
	OpReadDir
	OpStat
	OpSyncDir
	OpSyncFS
	OpStatfs
	OpLock

	OpAny = OpLock<<1 - 1
)

// opNames are the names of the operations, in the order of the bits.
var opNames = [...]string{
	"open", "direct", "read", "write", "sync", "allocate", "close", "rename", "publish", "link", "remove", "mkdir",
	"readdir", "stat", "syncdir", "syncfs", "statfs", "lock",
}

func (o Op) String() string {
	if o&OpAny == OpAny {
		return "any"
	}
	var words []string
	for i, name := range opNames {
		if o&(1<<i) != 0 {
			words = append(words, name)
		}
	}
	return strings.Join(words, ",")
}
