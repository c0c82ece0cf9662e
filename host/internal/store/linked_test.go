package store

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSecondNameOfAPiece gives a piece another name in the root, as a copy by links does. A scan counts its bytes once
// and leaves it the name that loads look for.
func TestSecondNameOfAPiece(t *testing.T) {
	f := newFixture(t, t.TempDir(), 6, 1)
	f.mustPut(0, 1)
	name := f.pieceFile(0, 0)
	dir := filepath.Join(f.cfg.Roots[0].Path, "backup")
	must(t, os.Mkdir(dir, 0o700))
	must(t, os.Link(name, filepath.Join(dir, filepath.Base(name))))
	f.crash()
	f.mustRead(0, 1)
	f.checkUsed()
	var st unix.Stat_t
	if err := unix.Stat(name, &st); err != nil || st.Nlink != 1 {
		t.Errorf("%d names, %v", st.Nlink, err)
	}
	if n := f.store.Stats().Roots[0].Used; n != 2*pieceBytes {
		t.Errorf("%d bytes of two pieces of %d", n, pieceBytes)
	}
}
