package regular

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
)

func TestReadFile(t *testing.T) {
	dir := testenv.Dir(t)
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(os.WriteFile(at("file"), []byte("0123456789"), 0o600), os.Symlink("file", at("link")),
		unix.Mkfifo(at("fifo"), 0o600), os.Symlink("fifo", at("link to fifo")), os.Mkdir(at("dir"), 0o700)); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", at("socket"))
	testenv.OK(t, err)
	defer l.Close()
	for _, c := range []struct {
		path  string
		limit int64
		is    error
	}{
		{at("file"), 10, nil}, {at("link"), 10, nil}, {at("file"), 9, ErrTooLarge}, {at("nothing"), 10, fs.ErrNotExist},
		{at("fifo"), 10, ErrNotRegular}, {at("link to fifo"), 10, ErrNotRegular}, {at("socket"), 10, ErrNotRegular},
		{at("dir"), 10, ErrNotRegular}, {"/dev/zero", 10, ErrNotRegular}, {"/dev/tty", 10, ErrNotRegular},
		{"/proc/self/maps", 10, ErrTooLarge}, // it has no size
	} {
		b, err := ReadFile(t.Context(), c.path, c.limit)
		if !errors.Is(err, c.is) || err == nil && string(b) != "0123456789" {
			t.Errorf("read %s: got %q, %v", c.path, b, err)
		}
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("stop")
	cancel(stop)
	if _, err := ReadFile(ctx, at("file"), 10); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of its context: %v", err)
	}
}

// What is no regular file is not opened, neither at first nor when it has taken a file's place: who asks what counts does not wait.
func TestRenewedIsRegular(t *testing.T) {
	name := filepath.Join(t.TempDir(), "f")
	read := func() (string, error) {
		b, err := os.ReadFile(name)
		return string(b), err
	}
	testenv.OK(t, unix.Mkfifo(name, 0o600))
	if _, err := Renew(read, slog.New(slog.DiscardHandler), name); !errors.Is(err, ErrNotRegular) {
		t.Errorf("a FIFO: got %v, want %v", err, ErrNotRegular)
	}
	testenv.OK(t, os.Remove(name))
	testenv.OK(t, os.WriteFile(name, []byte("one"), 0o600))
	r, err := Renew(read, slog.New(slog.DiscardHandler), name)
	testenv.OK(t, err)
	testenv.OK(t, os.Remove(name))
	testenv.OK(t, unix.Mkfifo(name, 0o600))
	if got := r.Now(); got != "one" {
		t.Errorf("with a FIFO in its place it is %q, want %q", got, "one")
	}
}
