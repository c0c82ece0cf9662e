package memfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// errMemory means that the machine has too little memory.
var errMemory = errors.New("memfs: not enough memory")

// One part in so many of the memory is left to others: by memory that was asked for, and by memory that grows as needed.
const (
	keepFree         = 32
	keepFreeAsNeeded = 8
)

// enough fails if n more bytes leave less than one part in keep of the memory. Without the check the kernel would end
// processes.
func enough(n, keep int64) error {
	if total, available, ok := memory("/"); ok && available-n < total/keep {
		return fmt.Errorf("%w: %d of %d bytes are available, %d more are wanted, and one part in %d is left to others",
			errMemory, available, total, n, keep)
	}
	return nil
}

// Available is what is available of the memory of the machine, or of this process's control group; 0 if neither says.
func Available() int64 {
	_, available, _ := memory("/")
	return available
}

// memory returns what the machine, or the control group of this process, has and what of it is available.
func memory(top string) (total, available int64, ok bool) {
	for line := range strings.Lines(read(top, "proc/meminfo")) {
		key, rest, _ := strings.Cut(line, ":")
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			continue
		}
		n, err := strconv.ParseInt(fields[0], 10, 64)
		switch {
		case err != nil:
		case key == "MemTotal":
			total = n << 10
		case key == "MemAvailable":
			available, ok = n<<10, true
		}
	}
	group := ""
	for line := range strings.Lines(read(top, "proc/self/cgroup")) {
		if path, found := strings.CutPrefix(strings.TrimSpace(line), "0::"); found {
			group = path
		}
	}
	for ; ; group = filepath.Dir(group) { // a limit may be set above
		dir := filepath.Join("sys/fs/cgroup", group)
		limit, err := number(top, dir+"/memory.max")
		used, err2 := number(top, dir+"/memory.current")
		if err == nil && err2 == nil && ok {
			total, available = min(total, limit), min(available, limit-used+cached(top, dir))
		}
		if group == "" || group == "/" || group == "." {
			return total, available, ok
		}
	}
}

// cached is the memory of a control group that the kernel can take back at once.
func cached(top, dir string) int64 {
	for line := range strings.Lines(read(top, dir+"/memory.stat")) {
		if text, found := strings.CutPrefix(line, "inactive_file "); found {
			n, _ := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
			return n
		}
	}
	return 0
}

func number(top, name string) (int64, error) {
	return strconv.ParseInt(strings.TrimSpace(read(top, name)), 10, 64)
}

func read(top, name string) string {
	b, _ := os.ReadFile(filepath.Join(top, name)) // missing: the machine has no such limit
	return string(b)
}
