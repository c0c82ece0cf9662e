package faultfs

import (
	"bytes"
	"errors"
	"io"
	"os"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

func (s *suite) memory(bytes int) []byte {
	slots, err := staging.NewSlots(1, bytes)
	s.ok(err)
	s.Cleanup(func() { s.ok(slots.Close()) })
	slot, _ := slots.TryAcquire()
	s.Cleanup(slot.Release)
	return slot.Bytes()
}

// direct does aligned I/O through files of OpenDirect, whether they are direct here or not.
func (s *suite) direct() {
	mem := s.memory(1 << 20)
	for round, name := range []string{"first", "later"} {
		for i := range mem {
			mem[i] = byte(i*3 + i>>12 + round)
		}
		want := bytes.Clone(mem)
		f, err := staging.OpenDirect(s.fs, s.path(name), fresh, 0o600)
		s.ok(err)
		info, err := f.Stat()
		s.ok(err)
		if info.Size != 0 {
			s.Fatalf("a new file has %d bytes", info.Size)
		}
		_, err = f.WriteAt(mem, 0)
		s.ok(err)
		clear(mem)
		_, err = f.ReadAt(mem, 0)
		s.ok(err)
		if !bytes.Equal(mem, want) {
			s.Fatal("read other bytes than were written")
		}
		s.ok(f.Close())
		if _, err := staging.OpenDirect(s.fs, s.path(name), fresh, 0o600); !errors.Is(err, os.ErrExist) {
			s.Fatalf("opened twice as new: %v", err)
		}
	}
	s.create("odd", string(bytes.Repeat([]byte("odd"), 1500)))
	f, err := staging.OpenDirect(s.fs, s.path("odd"), os.O_RDONLY, 0)
	s.ok(err)
	defer f.Close()
	n, err := f.ReadAt(mem[:8192], 0)
	if n != 4500 || err != io.EOF {
		s.Fatalf("a file of 4500 bytes: read %d, %v", n, err)
	}
	if n, err = f.ReadAt(mem[:4096], 4096); n != 404 || err != io.EOF {
		s.Fatalf("its second page: read %d, %v", n, err)
	}
	if n, err = f.ReadAt(mem[:4096], 8192); n != 0 || err != io.EOF {
		s.Fatalf("past its end: read %d, %v", n, err)
	}
	_, err = staging.OpenDirect(s.fs, s.path("none/a"), fresh, 0o600)
	s.is(err, os.ErrNotExist)
	_, err = staging.OpenDirect(s.fs, s.path("none"), os.O_RDONLY, 0)
	s.is(err, os.ErrNotExist)
}

// directAlignment checks that what is not aligned is refused, by name, before the kernel sees it.
func (s *suite) directAlignment() {
	f, err := staging.OpenDirect(s.fs, s.path("a"), fresh, 0o600)
	s.ok(err)
	defer f.Close()
	mem := s.memory(4 * staging.Align)
	if !f.Direct() {
		_, err := f.WriteAt(mem[1:100], 3)
		s.ok(err)
		s.Log("this file system takes no direct I/O; alignment does not matter")
		return
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	s.ok(err)
	if flags&unix.O_DIRECT == 0 {
		s.Fatal("says that it is direct and is not")
	}
	for _, c := range []struct {
		p     []byte
		off   int64
		field string
	}{
		{mem[512 : 512+4096], 0, "address"},
		{mem[:4096+512], 0, "length"},
		{mem[:4096], 512, "offset"},
		{mem[1:2], 1, "address"},
	} {
		for op, do := range map[string]func([]byte, int64) (int, error){"read": f.ReadAt, "write": f.WriteAt} {
			n, err := do(c.p, c.off)
			var align *staging.AlignError
			if n != 0 || !errors.Is(err, staging.ErrAlign) || !errors.As(err, &align) || align.Field != c.field ||
				align.Op != op {
				s.Errorf("%s of %d bytes at %d: %d, %v, want its %s named", op, len(c.p), c.off, n, err, c.field)
			}
		}
	}
}
