package shared

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// Control files contain a checksum followed by JSON, and are replaced by a rename within their directory. Each has one writer.

const (
	controlMagic = "kvshare1 "
	controlHead  = len(controlMagic) + 16 + 1
	maxControl   = 64 << 20
)

// EncodeControl returns the content of a control file.
func EncodeControl(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return append(fmt.Appendf(nil, "%s%016x\n", controlMagic, xxh3.Hash(text)), text...), nil
}

// DecodeControl decodes the content of a control file. It returns ErrDamaged if the checksum does not match.
func DecodeControl(b []byte, v any) error {
	if len(b) < controlHead || string(b[:len(controlMagic)]) != controlMagic {
		return fmt.Errorf("%w: no heading", ErrDamaged)
	}
	head, text := b[:controlHead], b[controlHead:]
	if want := fmt.Appendf(nil, "%s%016x\n", controlMagic, xxh3.Hash(text)); !bytes.Equal(head, want) {
		return fmt.Errorf("%w: its checksum", ErrDamaged)
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}

// tree is the protocol's directory tree, in which every member reads and writes files.
type tree struct {
	fs   staging.FS
	base string // <root>/.kvhost/shared
	part []byte // buffer for reading logs
}

// Hosts returns the hosts that share a root. The list includes hosts that were killed and not removed since.
func Hosts(fsys staging.FS, root string) (names []string, err error) {
	list, err := fsys.ReadDir((&tree{base: root + "/" + Dir}).hosts())
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names, err
}

func (t *tree) hosts() string            { return t.base + "/hosts" }
func (t *tree) gone() string             { return t.base + "/gone" }
func (t *tree) epochDir(n uint64) string { return t.base + "/e" + strconv.FormatUint(n, 10) }

func (t *tree) put(name string, v any) error { return t.replace(name, v, false) }

// keep replaces a control file durably, its name included. It is used for files that others rely on after a power loss.
func (t *tree) keep(name string, v any) error {
	if err := t.replace(name, v, true); err != nil {
		return err
	}
	return t.fs.SyncDir(name[:strings.LastIndexByte(name, '/')])
}

func (t *tree) replace(name string, v any, sync bool) error {
	b, err := EncodeControl(v)
	if err != nil {
		return err
	}
	return pieceformat.ReplaceFile(t.fs, name+".new", name, sync, pieceformat.Holding(b))
}

func (t *tree) get(name string, v any) error {
	b, _, err := pieceformat.ReadFile(t.fs, name, maxControl)
	if errors.Is(err, pieceformat.ErrDamaged) {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	} else if err != nil {
		return err
	}
	if err := DecodeControl(b, v); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// list returns the names in a directory. It returns none if the directory does not exist.
func (t *tree) list(dir string) ([]string, error) {
	entries, err := t.fs.ReadDir(dir)
	if absent(err) {
		return nil, nil
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, err
}

// removeAll removes a directory and its contents. A missing name is not an error.
func (t *tree) removeAll(dir string) error {
	entries, err := t.fs.ReadDir(dir)
	if absent(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := dir + "/" + e.Name()
		if e.IsDir() {
			err = t.removeAll(name)
		} else {
			err = t.remove(name)
		}
		if err != nil {
			return err
		}
	}
	return t.remove(dir)
}

func (t *tree) remove(name string) error {
	return ignoreMissing(t.fs.Remove(name))
}

// look reports whether a name exists. On an error this is unknown.
func (t *tree) look(name string) (bool, error) {
	_, err := t.fs.Stat(name)
	if absent(err) {
		return false, nil
	}
	return err == nil, err
}

// absent reports whether a name is known not to exist.
func (t *tree) absent(name string) bool {
	there, err := t.look(name)
	return !there && err == nil
}

// missing reports whether an error means that a name does not exist or names another file now, for example because the file was
// replaced while it was read.
func missing(err error) bool { return absent(err) || errors.Is(err, unix.ESTALE) }

// absent reports whether an error proves that a name does not exist. ESTALE does not: a directory that could not be listed may
// have entries.
func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }

func ignoreMissing(err error) error {
	if absent(err) {
		return nil
	}
	return err
}
