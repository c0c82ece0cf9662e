package faultfs

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// SumTree describes everything in a directory: names, kinds, modes, names of links, and bytes. Whether something was read
// shows where times of access are kept.
func SumTree(t testing.TB, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s %o %d %s", strings.TrimPrefix(path, dir), st.Mode, st.Uid, time.Unix(st.Mtim.Unix()).UTC())
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			fmt.Fprintf(&b, " size %d", st.Size)
		}
		if e.Type().IsRegular() {
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " %x", sha256.Sum256(content))
		}
		b.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}
