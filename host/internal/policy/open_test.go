package policy

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"golang.org/x/sys/unix"
)

// What stands at a module's path, or at its signature's, may be no file at all. None of it may hold up who opens it.
func TestOddFilesAreRefused(t *testing.T) {
	key, _ := newKey(t)
	module := minimal(abi.RoleEvict).Bytes()
	odd := map[string]func(path string) error{
		"a FIFO":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a device":    func(path string) error { return os.Symlink("/dev/zero", path) },
		"a directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"a socket": func(path string) error {
			l, err := net.Listen("unix", path)
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		},
		"a huge file": func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 1<<40))
		},
	}
	for name, place := range odd {
		for _, of := range []string{"module", "signature"} {
			t.Run(name+" as "+of, func(t *testing.T) {
				dir, err := os.MkdirTemp(testenv.ShortTemp(), "kv") // a socket's path must be short
				testenv.OK(t, err)
				t.Cleanup(func() { os.RemoveAll(dir) })
				path := filepath.Join(dir, "m.wasm")
				at, is := path, ErrBadModule
				if of == "signature" {
					at, is = path+SignatureSuffix, ErrSignature
					err = os.WriteFile(path, module, 0o600)
				}
				testenv.OK(t, errors.Join(err, place(at)))
				done := started(func() error {
					_, err := Open(t.Context(), path, Options{PublicKey: key.String()})
					return err
				})
				if err := testenv.Receive(t, "the end of opening it", done); !errors.Is(err, is) || !strings.Contains(err.Error(), at) {
					t.Errorf("opening it: got %v, want %v that names %s", err, is, at)
				}
			})
		}
	}
}

func started(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return done
}
