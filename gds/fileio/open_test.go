package fileio

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"golang.org/x/sys/unix"
)

// TestReopenIsTheSameFile gives the name to another file between the two opens.
func TestReopenIsTheSameFile(t *testing.T) {
	testenv.Need(t, testenv.DirectIO)
	name := filepath.Join(t.TempDir(), "file")
	file, err := openRegular(name, os.O_RDWR|os.O_CREATE, 0o600)
	testenv.OK(t, err)
	defer file.Close()
	testenv.OK(t, os.WriteFile(name+".2", []byte("another"), 0o600))
	testenv.OK(t, os.Rename(name+".2", name))
	direct, err := reopen(file, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	testenv.OK(t, err)
	defer direct.Close()
	was, err := file.Stat()
	testenv.OK(t, err)
	now, err := direct.Stat()
	if err != nil || !os.SameFile(was, now) {
		t.Errorf("cuFile would get another file: %v", err)
	}
}

// TestOpenIsOfRegularFiles opens a pipe that nobody writes to.
func TestOpenIsOfRegularFiles(t *testing.T) {
	name := filepath.Join(t.TempDir(), "pipe")
	testenv.OK(t, unix.Mkfifo(name, 0o600))
	for _, flag := range []int{os.O_RDONLY, os.O_RDWR} {
		if file, err := openRegular(name, flag, 0); err == nil {
			file.Close()
			t.Error("a pipe is opened")
		}
	}
}
