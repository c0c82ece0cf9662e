package faultfs

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

func (s *suite) rename() {
	s.create("a", "A")
	s.create("b", "B")
	s.ok(s.fs.Rename(s.path("a"), s.path("b")))
	s.gone("a")
	if got := s.content("b"); got != "A" {
		s.Fatalf("b holds %q", got)
	}
	s.is(s.fs.Rename(s.path("a"), s.path("b")), fs.ErrNotExist)
	if got := s.content("b"); got != "A" {
		s.Fatalf("after a rename of nothing b holds %q", got)
	}
}

func (s *suite) renameNoReplace() {
	s.create("a", "A")
	s.create("b", "B")
	s.is(s.fs.RenameNoReplace(s.path("a"), s.path("b")), fs.ErrExist)
	if s.content("a") != "A" || s.content("b") != "B" {
		s.Fatal("a refused rename changed something")
	}
	s.ok(s.fs.RenameNoReplace(s.path("a"), s.path("c")))
	s.gone("a")
	if got := s.content("c"); got != "A" {
		s.Fatalf("c holds %q", got)
	}
	s.is(s.fs.RenameNoReplace(s.path("a"), s.path("d")), fs.ErrNotExist)
	s.is(s.fs.RenameNoReplace(s.path("c"), s.path("no/d")), fs.ErrNotExist)
	if got := s.content("c"); got != "A" {
		s.Fatalf("c holds %q", got)
	}
}

// oneWinner has many publish one name at a time: one does, and its content stays.
func (s *suite) oneWinner() {
	for round := range 10 {
		target := "t" + string(rune('0'+round))
		const n = 8
		for i := range n {
			s.create(target+string(rune('a'+i)), string(rune('a'+i)))
		}
		var mu sync.Mutex
		var won []string
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				who := string(rune('a' + i))
				switch err := s.fs.RenameNoReplace(s.path(target+who), s.path(target)); {
				case err == nil:
					mu.Lock()
					won = append(won, who)
					mu.Unlock()
				case !errors.Is(err, fs.ErrExist):
					s.Error(err)
				}
			})
		}
		wg.Wait()
		if len(won) != 1 || s.content(target) != won[0] {
			s.Fatalf("winners %q, content %q", won, s.content(target))
		}
	}
}

func (s *suite) linkRemove() {
	s.create("a", "A")
	s.ok(s.fs.Link(s.path("a"), s.path("b")))
	a, err := s.fs.Stat(s.path("a"))
	s.ok(err)
	b, err := s.fs.Stat(s.path("b"))
	s.ok(err)
	if !a.Same(b) || a.Links != 2 {
		s.Fatalf("%+v %+v", a, b)
	}
	s.is(s.fs.Link(s.path("a"), s.path("b")), fs.ErrExist)
	s.ok(s.fs.Remove(s.path("a")))
	s.is(s.fs.Remove(s.path("a")), fs.ErrNotExist)
	f, err := s.fs.OpenFile(s.path("b"), os.O_RDONLY, 0)
	s.ok(err)
	defer f.Close()
	s.ok(s.fs.Remove(s.path("b")))
	info, err := f.Stat()
	s.ok(err)
	if info.Links != 0 || !info.Same(a) {
		s.Fatalf("unlinked but open: %+v", info)
	}
	var got [1]byte
	if _, err := f.ReadAt(got[:], 0); err != nil || got[0] != 'A' {
		s.Fatalf("unlinked but open: %q %v", got, err)
	}
}

func (s *suite) directories() {
	s.ok(s.fs.MkdirAll(s.path("x/y/z"), 0o700))
	s.ok(s.fs.MkdirAll(s.path("x/y/z"), 0o700))
	s.is(s.fs.Mkdir(s.path("x"), 0o700), fs.ErrExist)
	s.is(s.fs.Mkdir(s.path("p/q"), 0o700), fs.ErrNotExist)
	want := []string{"a", "b", "c", "sub"}
	for _, i := range rand.Perm(3) {
		s.create("x/"+want[i], "")
	}
	s.ok(s.fs.Mkdir(s.path("x/sub"), 0o700))
	s.ok(s.fs.Remove(s.path("x/y/z")))
	s.ok(s.fs.Remove(s.path("x/y")))
	list, err := s.fs.ReadDir(s.path("x"))
	s.ok(err)
	var got []string
	for _, e := range list {
		got = append(got, e.Name())
		if e.IsDir() != (e.Name() == "sub") {
			s.Errorf("%s is a directory: %v", e.Name(), e.IsDir())
		}
	}
	if !slices.Equal(got, want) {
		s.Fatalf("listed %q, want %q", got, want)
	}
	err = s.fs.Remove(s.path("x"))
	s.is(err, unix.ENOTEMPTY)
	_, err = s.fs.ReadDir(s.path("none"))
	s.is(err, fs.ErrNotExist)
}
