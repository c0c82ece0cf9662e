package store

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"golang.org/x/sys/unix"
)

// tree is a root with pieces, next to a directory that nothing in the root may reach. It is as an attacker makes it who can
// write into a root and wants the host to serve, change or remove a file that is outside, or to stop: every intruder in every
// place. Trees are made by construction, so that a new place or a new intruder meets all of the other kind.
type tree struct {
	Root    string
	Outside string // see [makeOutside]
	Piece   string // of the root: a piece, as a path below it
	Free    string // the name of a piece that is not there
	Text    string // digest of the namespace
	Plan    string // digest of the plan
}

// place is a name in a root.
type place struct {
	Name string
	Path string // below the root
}

// places are the names that intruders take.
func (t *tree) places() []place {
	places := []place{
		{"a piece", t.Piece},
		{"the name of a piece to come", t.Free},
		{"the directory of a piece", filepath.Dir(t.Piece)},
		{"the directory of a namespace", strings.SplitN(t.Piece, "/", 2)[0]},
		{"a directory between", filepath.Dir(filepath.Dir(t.Piece))},
		{"a name at the top", "stray"},
		{"a name that sorts first", "!"},
		{"a name of 255 bytes", strings.Repeat("n", 255)},
		{"a hidden name", ".hidden"},
		{"a temporary of this host", pieceformat.TempName(t.Piece, treeHost, 7)},
		{"a temporary of another", pieceformat.TempName(t.Piece, "other", 7)},
		{"a temporary beside the lock", pieceformat.TempName(pieceformat.LockFile, treeHost, 8)},
		{"a quarantined file", pieceformat.QuarantineName(1, 1, "x.kv")},
		{"a repaired file", pieceformat.QuarantineDir + "/0000000000000001-repair-x.kv"},
		{"the probe's lock", pieceformat.MetaDir + "/probe.lock"},
		{"the lock", pieceformat.LockFile},
		{"the shared tree", pieceformat.MetaDir + "/shared"},
		{"the store's directory", pieceformat.MetaDir},
		{"the copies' directory", pieceformat.CopyDir},
	}
	for _, file := range pieceformat.RootFiles {
		places = append(places, place{file, file})
	}
	for _, dir := range pieceformat.RootDirs[1:] {
		places = append(places, place{dir, dir})
	}
	for _, dir := range pieceformat.Copies(pieceformat.NamespacesDir) {
		places = append(places, place{"a text in " + dir, dir + "/" + t.Text}, place{"another text in " + dir, dir + "/" + strings.Repeat("cd", 16)})
	}
	for _, dir := range pieceformat.Copies(pieceformat.PlansDir) {
		places = append(places, place{"a plan in " + dir, dir + "/" + t.Plan})
	}
	return places
}

// treeHost is the id of the host that the trees are made for.
const treeHost = "hostilehost"

// intruder is something that takes a name.
type intruder struct {
	Name string
	// Make makes it under a name of the tree. The error is unix.EPERM where this user may not.
	Make func(t *tree, name string) error
}

func link(to func(t *tree, name string) string) func(*tree, string) error {
	return func(t *tree, name string) error { return os.Symlink(to(t, name), name) }
}

func outside(rel string) func(*tree, string) error {
	return link(func(t *tree, _ string) string { return filepath.Join(t.Outside, rel) })
}

func device(kind, major, minor uint32) func(*tree, string) error {
	return func(_ *tree, name string) error {
		return unix.Mknod(name, kind|0o600, int(unix.Mkdev(major, minor)))
	}
}

// intruders are all kinds.
func intruders() []intruder {
	return []intruder{
		{"a link to a file outside", outside("file")},
		{"a link to a piece outside", outside("piece.kv")},
		{"a link to a directory outside", outside("dir")},
		{"a link to a pipe outside", outside("pipe")},
		{"a link to nothing outside", outside("dir/unmade")},
		{"a relative link outside", link(func(t *tree, name string) string {
			rel, _ := filepath.Rel(filepath.Dir(name), filepath.Join(t.Outside, "piece.kv"))
			return rel
		})},
		{"a link to itself", link(func(_ *tree, name string) string { return filepath.Base(name) })},
		{"a link to the root", link(func(t *tree, _ string) string { return t.Root })},
		{"a link to a descriptor", link(func(*tree, string) string { return "/proc/self/fd/0" })},
		{"a link to the host's memory", link(func(*tree, string) string { return "/proc/self/mem" })},
		{"a second name of a file outside", func(t *tree, name string) error {
			return os.Link(filepath.Join(t.Outside, "file"), name)
		}},
		{"a second name of a piece outside", func(t *tree, name string) error {
			return os.Link(filepath.Join(t.Outside, "piece.kv"), name)
		}},
		{"a pipe", func(_ *tree, name string) error { return unix.Mkfifo(name, 0o600) }},
		{"a socket", func(_ *tree, name string) error { return unix.Mknod(name, unix.S_IFSOCK|0o600, 0) }},
		{"a device without end", device(unix.S_IFCHR, 1, 5)},
		{"a device that is not there", device(unix.S_IFBLK, 254, 254)},
		{"an empty directory", func(_ *tree, name string) error { return os.Mkdir(name, 0o700) }},
		{"a directory with a file", func(_ *tree, name string) error {
			if err := os.Mkdir(name, 0o700); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(name, "file"), []byte("content"), 0o600)
		}},
		{"a directory that nobody may read", func(_ *tree, name string) error { return os.Mkdir(name, 0) }},
		{"an empty file", func(_ *tree, name string) error { return os.WriteFile(name, nil, 0o600) }},
		{"a file of zeros", func(_ *tree, name string) error { return os.WriteFile(name, make([]byte, 8192), 0o600) }},
		{"a file that nobody may read", func(_ *tree, name string) error { return os.WriteFile(name, []byte("content"), 0) }},
		{"another user's file", func(_ *tree, name string) error {
			if err := os.WriteFile(name, []byte("content"), 0o600); err != nil {
				return err
			}
			return os.Chown(name, 12345, 12345)
		}},
		{"a sparse giant", func(_ *tree, name string) error {
			if err := os.WriteFile(name, nil, 0o600); err != nil {
				return err
			}
			return os.Truncate(name, 1<<40)
		}},
	}
}

// Put gives a name of the root to an intruder, in the place of what has it.
func (t *tree) Put(p place, in intruder) error {
	name := filepath.Join(t.Root, p.Path)
	if err := os.RemoveAll(name); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return err
	}
	if err := in.Make(t, name); err != nil {
		return fmt.Errorf("%s in the place of %s: %w", in.Name, p.Name, err)
	}
	return nil
}

// makeOutside fills the directory outside: piece is the bytes of a sound piece.
func (t *tree) makeOutside(piece []byte) error {
	if err := os.MkdirAll(filepath.Join(t.Outside, "dir", "sub"), 0o700); err != nil {
		return err
	}
	for _, name := range []string{"file", "dir/file", "dir/lock", "dir/sub/" + filepath.Base(t.Piece)} {
		if err := os.WriteFile(filepath.Join(t.Outside, name), []byte("not the host's"), 0o600); err != nil {
			return err
		}
	}
	for _, name := range []string{"piece.kv", "dir/" + filepath.Base(t.Piece)} {
		if err := os.WriteFile(filepath.Join(t.Outside, name), piece, 0o600); err != nil {
			return err
		}
	}
	return unix.Mkfifo(filepath.Join(t.Outside, "pipe"), 0o600)
}
