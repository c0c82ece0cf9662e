package staging

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestNoReplaceFallbacks publishes on file systems that refuse some of the calls, or do them and report a failure.
func TestNoReplaceFallbacks(t *testing.T) {
	refuseRename2 := func(errno error) func(*renamer) {
		return func(r *renamer) {
			r.renameat2 = func(at, at, uint) error { return errno }
		}
	}
	refuseLink := func(errno error) func(*renamer) {
		return func(r *renamer) {
			refuseRename2(unix.EINVAL)(r)
			r.link = func(at, at) error { return errno }
		}
	}
	never := func(r *renamer) {
		r.rename = func(at, at) error { return errors.New("a replacing rename") }
	}
	for _, c := range []struct {
		name string
		mod  func(*renamer)
		safe bool // never gets to the rename that could replace
	}{
		{"renameat2", func(*renamer) {}, true},
		{"EINVAL", refuseRename2(unix.EINVAL), true},
		{"ENOSYS", refuseRename2(unix.ENOSYS), true},
		{"link EPERM", refuseLink(unix.EPERM), false},
		{"link EOPNOTSUPP", refuseLink(unix.EOPNOTSUPP), false},
		{"link ENOSYS", refuseLink(unix.ENOSYS), false},
		{"link EMLINK", refuseLink(unix.EMLINK), false},
		{"interrupted", func(r *renamer) {
			refuseRename2(unix.EINVAL)(r)
			r.link, r.unlink, r.lstat = interrupted(r.link), interruptedOne(r.unlink), interruptedStat(r.lstat)
		}, true},
		{"done but EIO", func(r *renamer) {
			do := r.renameat2
			r.renameat2 = func(o, n at, f uint) error {
				if err := do(o, n, f); err != nil {
					return err
				}
				return unix.EIO
			}
		}, true},
		{"sent twice, the second finds nothing", func(r *renamer) {
			do := r.renameat2
			r.renameat2 = func(o, n at, f uint) error {
				if err := do(o, n, f); err != nil {
					return err
				}
				return do(o, n, f)
			}
		}, true},
		{"linked but EEXIST", func(r *renamer) {
			refuseRename2(unix.EINVAL)(r)
			do := r.link
			r.link = func(o, n at) error {
				if err := do(o, n); err != nil {
					return err
				}
				return do(o, n)
			}
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := renames
			c.mod(&r)
			if c.safe {
				never(&r)
			}
			dir := t.TempDir()
			a, b, taken := filepath.Join(dir, "a"), filepath.Join(dir, "b"), filepath.Join(dir, "taken")
			put(t, a, "A")
			put(t, taken, "T")
			if err := r.noReplaceByPath(a, taken); !errors.Is(err, unix.EEXIST) {
				t.Fatalf("onto a name that is taken: %v", err)
			}
			if get(t, a) != "A" || get(t, taken) != "T" {
				t.Fatal("the refusal changed something")
			}
			must(t, r.noReplaceByPath(a, b))
			if _, err := os.Lstat(a); !os.IsNotExist(err) {
				t.Fatalf("the old name is there: %v", err)
			}
			if get(t, b) != "A" {
				t.Fatal("another content")
			}
			if err := r.noReplaceByPath(a, filepath.Join(dir, "c")); !errors.Is(err, unix.ENOENT) {
				t.Fatalf("of a name that is not there: %v", err)
			}
		})
	}
}

func TestNoReplaceReportsRealFailures(t *testing.T) {
	for _, errno := range []unix.Errno{unix.EIO, unix.EXDEV, unix.ESTALE, unix.ENOSPC, unix.EACCES} {
		r := renames
		r.renameat2 = func(at, at, uint) error { return errno }
		dir := t.TempDir()
		a := filepath.Join(dir, "a")
		put(t, a, "A")
		err := r.noReplaceByPath(a, filepath.Join(dir, "b"))
		var le *os.LinkError
		if !errors.Is(err, errno) || !errors.As(err, &le) || le.Old != a {
			t.Errorf("rename: error %v, want %v with the names", err, errno)
		}
		if get(t, a) != "A" {
			t.Errorf("%v: the file is gone", errno)
		}
	}
}

// TestNoReplaceLeavesOldName publishes where the old name cannot be removed: published is published.
func TestNoReplaceLeavesOldName(t *testing.T) {
	r := renames
	r.renameat2 = func(at, at, uint) error { return unix.EINVAL }
	r.unlink = func(at) error { return unix.EIO }
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	put(t, a, "A")
	must(t, r.noReplaceByPath(a, b))
	if get(t, b) != "A" {
		t.Fatal("not published")
	}
}

func TestReplaceReportedAndDone(t *testing.T) {
	r := renames
	do := r.rename
	r.rename = func(o, n at) error {
		if err := do(o, n); err != nil {
			return err
		}
		return unix.ESTALE
	}
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	put(t, a, "A")
	put(t, b, "B")
	must(t, r.replaceByPath(a, b))
	if get(t, b) != "A" {
		t.Fatal("another content")
	}
	r.rename = func(at, at) error { return unix.ESTALE }
	put(t, a, "A2")
	if err := r.replaceByPath(a, b); !errors.Is(err, unix.ESTALE) {
		t.Fatalf("a rename that did not happen: %v", err)
	}
}

func (r *renamer) noReplaceByPath(oldname, newname string) error {
	return r.noReplace(byPath(oldname), byPath(newname), oldname, newname)
}

func (r *renamer) replaceByPath(oldname, newname string) error {
	return r.replace(byPath(oldname), byPath(newname), oldname, newname)
}

func interrupted(do func(at, at) error) func(at, at) error {
	first := true
	return func(o, n at) error {
		if first {
			first = false
			return unix.EINTR
		}
		return do(o, n)
	}
}

func interruptedOne(do func(at) error) func(at) error {
	two := interrupted(func(o, _ at) error { return do(o) })
	return func(n at) error { return two(n, at{}) }
}

func interruptedStat(do func(at, *unix.Stat_t) error) func(at, *unix.Stat_t) error {
	odd := false
	return func(n at, st *unix.Stat_t) error {
		if odd = !odd; odd {
			return unix.EINTR
		}
		return do(n, st)
	}
}

func put(t *testing.T, name, content string) {
	t.Helper()
	must(t, os.WriteFile(name, []byte(content), 0o600))
}

func get(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	must(t, err)
	return string(b)
}
